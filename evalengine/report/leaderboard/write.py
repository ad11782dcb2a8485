"""Checkpoints of one training on disk: the page, the picture of the curves, and the file that lists the runs."""

from __future__ import annotations

import os
from pathlib import Path

from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.history import history_picture
from evalengine.report.leaderboard.numbers import board_json
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.read.experiment import SWEEP_FORMAT
from evalengine.report.sweep.write import VERSION, write_picture_and_list


def write_history(board: Board, name: str, folder: Path) -> list[Path]:
    """Writes the three files, each whole or not at all, the list last: it makes the folder a finished experiment's.

    Raises `EvalEngineError` if the disk refuses.
    """
    page = folder / f"{name}.html"
    leaderboard_page(board, history=True, beside=folder).write(page)
    content = board_json(board)
    runs = [{**model, "source": os.path.relpath(model["source"], folder)} for model in content.pop("models")]
    listed = {**content, "format": SWEEP_FORMAT, "version": VERSION, "experiment": name, "runs": runs}
    return [page, *write_picture_and_list(name, folder, history_picture(board), listed)]
