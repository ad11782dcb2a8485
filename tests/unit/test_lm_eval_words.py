"""lm-eval's command line is answered with ours, whole; what is printed composes to the settings that were meant."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

from evalengine.__main__ import main
from evalengine.cli.commands.lm_eval_words import LEFT_OUT, SHORT, in_our_words
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.config.synonyms import LM_EVAL
from evalengine.config.words import known_keys


def answered(line: str) -> tuple[list[str], str]:
    """(the words that the answer tells to write after the program, the whole answer)."""
    said = in_our_words(shlex.split(line))
    assert said is not None and said.count("\n") == 0
    found = re.search(r"write (.*?)(?: \(left out: |; python -m evalengine lm_eval|$)", said)
    assert found is not None
    program, words = shlex.split(found[1])[:3], shlex.split(found[1])[3:]
    assert program == ["python", "-m", "evalengine"]
    return words, said


def composed(line: str) -> Config:
    (job,) = compose_jobs(answered(line)[0])
    return job.config


def test_a_usual_line() -> None:
    line = (
        "--model hf --model_args pretrained=EleutherAI/pythia-160m,revision=step100,dtype=float --tasks gsm8k,arc_easy "
        "--num_fewshot 5 --limit 10 --batch_size auto:4 --device cuda:0 --output_path out --log_samples --seed 3"
    )
    config = composed(line)
    assert (config.model.path, config.model.revision, config.engine.dtype) == (
        *("EleutherAI/pythia-160m", "step100", "float32"),
    )
    assert {name: task.num_fewshot for name, task in config.tasks.items()} == {"gsm8k": 5, "arc_easy": 5}
    assert (config.limit, config.engine.device, config.output_dir) == (10, "cuda:0", "out")
    assert (config.seed, config.fewshot_seed) == (3, 3)
    said = answered(line)[1]
    assert (
        "(left out: --model: the engine is this one; --batch_size: the engine fills its batches itself; --log" in said
    )


def test_generation_and_chat() -> None:
    config = composed(
        "run -M vllm -a pretrained=./w max_model_len=2048,tensor_parallel_size=2 -t gsm8k -L 2 -b 8 --gen_kwargs "
        """'{"temperature": 0.5, "until": ["a, b", "\\n"]}' --apply_chat_template --fewshot_as_multiturn False """
        "--system_instruction 'Be brief, please.' --seed 0,1,2,3 -c kept --confirm_run_unsafe_code"
    )
    generation = config.tasks["gsm8k"].generation
    assert (generation.temperature, generation.until) == (0.5, ["a, b", "\n"])
    assert (config.apply_chat_template, config.fewshot_as_multiturn) == (True, False)
    assert config.system_instruction == "Be brief, please."
    assert (config.engine.max_model_len, config.engine.tensor_parallel_size, config.engine.max_num_seqs) == (2048, 2, 8)
    assert (config.seed, config.fewshot_seed, config.cache.path) == (2, 3, "kept")
    assert config.allow_code_execution is True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tasks mmlu_anatomy", "task=mmlu/anatomy"),
        ("--tasks ./mine.yaml gsm8k", "task=[./mine.yaml,gsm8k]"),
        ("--tasks nosuch", "task=lm_eval/nosuch"),
        ("--model qwen3-0.6b", "model=qwen3-0.6b"),
        ("--model org/weights --limit=3.0", "model.path=org/weights limit=3"),
        ("-m hf --tasks arc_easy", "task=arc_easy"),
        ("-m limit=1,2 --tasks arc_easy", "-m limit=1,2 task=arc_easy"),
        (
            "--gen_kwargs temperature=0.7,do_sample=True,top_p=0.9",
            "task.generation.temperature=0.7 task.generation.top_p=0.9",
        ),
        ("--limit 5 task=gsm8k -c", "task=gsm8k -c limit=5"),
        ("--nonsense", "nonsense=VALUE"),
    ],
)
def test_each_word(line: str, words: str) -> None:
    assert answered(line)[0] == words.split()


def test_a_share_of_the_rows_is_no_number() -> None:
    words, said = answered("--tasks hellaswag --limit 0.1")
    assert words == ["task=hellaswag", "limit=N"] and "--limit 0.1: N is a number of documents of each task" in said


def test_our_own_options_are_left_alone() -> None:
    for line in ("", "-m limit=1,2", "task=gsm8k -c", "--cfg", "-h", "run --multirun limit=1,2"):
        assert in_our_words(shlex.split(line)) is None


def test_every_setting_that_is_named_exists() -> None:
    assert [name for name in LM_EVAL.values() if name not in known_keys()] == []


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")
def test_lm_evals_own_options_are_all_known() -> None:
    """None of them is taken for a setting of ours that does not exist."""
    import argparse

    from lm_eval._cli.run import Run

    parser = argparse.ArgumentParser()
    command = Run(parser.add_subparsers())
    options = {option for action in command._parser._actions for option in action.option_strings}
    assert {"--tasks", "--model_args", "-t"} <= options
    for option in options - {"-h", "--help"}:
        word, said = answered(f"--limit 1 {option} 5")
        assert [w for w in word if w.partition("=")[0] not in known_keys()] == [], said
    assert {option for option in options if len(option) == 2} - {"-h"} <= {*SHORT}
    assert {*LEFT_OUT} - {"do_sample", "model"} <= {option.lstrip("-") for option in options}


def test_the_command_line_answers_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "gsm8k", "--num_fewshot", "5"]) == 2
    said = capsys.readouterr().err
    assert (
        "--tasks --num_fewshot: settings have no dashes; write python -m evalengine task=gsm8k task.num_fewshot=5"
        in said
    )
    assert said.count("\n") == 1
