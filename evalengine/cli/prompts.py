"""`experiment=prompts`: one model and the same documents under several prompts, and how much of a score's variance they
are.

<output_dir>/prompts-<tasks>-<model>-<time>-<id>/
  1-fewshot_seed_1234/<run folder>       one for each prompt
  prompts.html, prompts.json             the page, and the list of the runs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from evalengine.config.compose import Job

NAME = "prompts"
# What writes a prompt. Anything else that is swept would be mistaken for the prompt's part.
OF_PROMPTS = ("fewshot_seed", "num_fewshot", "description", "choice_order", "system_instruction", "apply_chat_template",
              "fewshot_as_multiturn", "gen_prefix", "doc_to_text", "fewshot_file", "fewshot_split",
              "target_delimiter", "fewshot_delimiter", "enable_thinking", "chat_template_args")  # fmt: skip


def prompt_problems(jobs: Sequence[Job]) -> Iterator[str]:
    """Yields what is wrong with a sweep over prompts, a sentence each."""
    swept = {override.partition("=")[0] for job in jobs for override in job.overrides}
    if len(jobs) < 2:
        yield f'experiment={NAME}: one prompt is no sweep; give fewshot_seed=1,2,3 or \'task.description="a","b"\''
    if others := sorted(name for name in swept if name.rpartition(".")[2] not in OF_PROMPTS):
        yield f"{', '.join(others)}: experiment={NAME} sweeps what writes prompts ({', '.join(OF_PROMPTS)}) alone"
    for task, config in jobs[0].config.tasks.items():
        shots = jobs[0].config.task.num_fewshot if config.num_fewshot is None else config.num_fewshot
        if swept == {"fewshot_seed"} and not shots:
            yield (
                f"experiment={NAME}: {task} shows no exemplars, so that fewshot_seed changes no prompt; set "
                'task.num_fewshot=4, or sweep another setting: fewshot_seed=1234 \'task.description="a","b"\''
            )


def report_prompts(name: str, folder: Path, settings: Sequence[dict[str, str]], runs: Sequence[Path]) -> int:
    """Writes the variance components to the terminal and into the folder; returns the exit code 0."""
    from evalengine.report.read.load import load_run
    from evalengine.report.sweep.prompts import prompt_lines, sensitivities, write_prompts
    from evalengine.report.terminal.tables import print_lines

    loaded = [load_run(run) for run in runs]
    labels = [", ".join(f"{key} {value}" for key, value in own.items()) for own in settings]
    found = sensitivities(loaded)
    files = write_prompts(name, folder, loaded, labels, found)
    print_lines([*prompt_lines(found, labels), *map(str, files)])
    return 0
