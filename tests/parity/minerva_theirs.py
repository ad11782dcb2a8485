"""lm-eval's own evaluation of its Minerva tasks over made-up rows, as JSON; it runs as a process of its own.

    python -m tests.parity.minerva_theirs FOLDER        evaluates the requests in FOLDER/asked.json -> theirs.json
    python -m tests.parity.minerva_theirs --verdicts    rewrites tests/parity/minerva_verdicts.json

lm-eval asks for ANTLR 4.11, beside which Hydra does not run. The second form needs it, and reads it from PYTHONPATH:
`pip download --no-deps antlr4-python3-runtime==4.11.1`, unpacked into a folder. The first form uses the environment's
ANTLR in the way that our scorer's process does; the second form's verdicts show that both give equal scores.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from evalengine.tasks.lm_eval_yaml import installed_file
from evalengine.tasks.math_worker import let_sympy_read_latex, scorer
from evalengine.tasks.minerva import SCORER

VERDICTS = Path(__file__).with_name("minerva_verdicts.json")
FINAL = "Final Answer: The final answer is {}. I hope it is correct."
GOLDS = (
    *("4", "-7", "0.5", "\\frac12", "\\frac{3}{4}", "2\\pi", "[2,5)", "(1,2)", "1,2", "x=5", "10,000", "\\sqrt{3}"),
    *("\\sqrt[3]{8}", "5\\text{ cm}", "90^\\circ", "\\text{Evelyn}", "x^2+1", "\\infty", "\\binom{5}{2}", "12\\%"),
    *("\\$3.50", "\\left(-\\infty,3\\right]", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "a\\le b", "3!", "y = 2x - 1"),
    *("\\frac{\\sqrt{2}}{2}", "-\\frac{2}{3}", "2^{10}", "\\log_2 8", "6\\text{ and }7", "\\{1,2,3\\}"),
)
SAME = (  # other ways to write some of GOLDS, and malformed answers
    *("4.0", "\\frac{8}{2}", "1/2", "0.75", "\\pi\\cdot 2", "6.28", "1024", "3", "\\frac{1}{\\sqrt{2}}", "10000", "5"),
    *("5 cm", "\\frac{-2}{3}", "90", "10", "1+x^2", "2", "6", "2,1", "(2,5)", "\\frac", "{", "$", "}{", "\\boxed{"),
    *("\\text{", "^", "="),
)


def spread() -> dict[str, list[str]]:
    """Returns gold solution -> model answers: right, written otherwise, wrong, in no known form, and empty."""
    answers_of = {}
    for number, gold in enumerate(GOLDS):
        others = [*SAME[number % 4 :: 4], GOLDS[number - 1]]
        answers = [FINAL.format(f"${text}$") for text in (gold, *others)]
        answers += [FINAL.format(gold), f"It is $\\boxed{{{gold}}}$", f"\\boxed {gold}$ or so", "", "I do not know."]
        answers += [FINAL, f"the answer: {gold}", f"Final Answer: The final answer is ${gold}$", f"${gold}$ and $7$"]
        answers_of[f"So it is $\\boxed{{{gold}}}$."] = answers
    return answers_of


def speak(prompt: str) -> str:
    """Returns the made-up model's answer to a prompt over the rows of tests/parity/shipped_rows.py."""
    rng = random.Random(hashlib.sha256(prompt.encode()).digest())
    number = re.findall(r"What is \$(\d+)\$", prompt)[-1]
    values = [number, f"\\frac{{{number}}}{{7}}", "[2,5)", f"{number},000", "(1,2)", "7"]
    form = [FINAL.format("${}$"), "It is $\\boxed{{{}}}$.", "{}", "Final Answer: {}", ""]
    return rng.choice(form).format(rng.choice(values))


def verdicts() -> None:
    """Writes every answer's scores by lm-eval's unchanged module: solution -> its gold, and two digits per answer."""
    version = importlib.metadata.version("antlr4-python3-runtime")
    assert version.startswith("4.11"), f"needs ANTLR 4.11 on PYTHONPATH, this is {version}"
    module, scores_of = scorer(str(installed_file(SCORER))), {}
    for solution, answers in spread().items():
        gold = module.normalize_final_answer(module.remove_boxed(module.last_boxed_only_string(solution)))
        scores = [module.process_results({"solution": solution, "answer": gold}, [answer]) for answer in answers]
        scores_of[solution] = [gold, " ".join(f"{score['exact_match']}{score['math_verify']}" for score in scores)]
    versions = {name: importlib.metadata.version(name) for name in ("lm-eval", "math-verify", "sympy")}
    content = {"versions": {**versions, "antlr4": version}, "verdicts": scores_of}
    VERDICTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def evaluation(folder: Path) -> None:
    """Evaluates every request in the folder's asked.json by lm-eval, into its theirs.json."""
    let_sympy_read_latex()
    import datasets

    from tests.parity.agreement import evaluate_by_lm_eval
    from tests.parity.local_tasks import lm_eval_task_file

    datasets.disable_progress_bars()
    results: dict[str, Any] = {}
    for request in json.loads((folder / "asked.json").read_text()):
        rows = folder / (request["name"] if "500" in request["name"] else "subjects")
        config = lm_eval_task_file(request["name"], {file.stem: str(file) for file in rows.glob("*.jsonl")})
        result = evaluate_by_lm_eval(config, request["shots"], speak, apply_chat_template=request["chat"])
        kept = {key: result[key] for key in ("results", "versions", "samples")}
        results[json.dumps(request)] = kept
    (folder / "theirs.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    if sys.argv[1] == "--verdicts":
        verdicts()
    else:
        evaluation(Path(sys.argv[1]))
