"""The arguments and options of `tasks`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from evalengine.cli.commands.words import Command
from evalengine.config.shipped import available
from evalengine.util.command import Namespace


def _words(
    words: Annotated[list[str] | None, Argument(metavar="[NAME|FILE] [setting=value ...]", show_default=False,
                     help="one task (or a group, or a YAML file of your own: ./my_task.yaml), and settings as for a "
                     "run: task.num_fewshot=5, data_dir=FOLDER, apply_chat_template=true model=NAME, ...",
                     autocompletion=lambda incomplete: available("task"))] = None,
    show: Annotated[int | None, Option(metavar="N", help="its first N documents: the rows, the prompts as the model "
                    "sees them, the targets")] = None,
) -> Namespace:  # fmt: skip
    """Lists the tasks that can be run: where their rows come from (Hub id @ pinned commit), how many documents are
    evaluated, the metrics, and what a task needs beside the rows."""
    return Namespace(words=words or [], show=show)


EPILOG = "Exit codes: 0 listed, 2 bad usage, or rows or settings that cannot be used."
main = Command("tasks", _words, "evalengine.cli.task_list:main", EPILOG)
