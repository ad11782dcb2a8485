"""Keeps what a server answers as a run, and names each answer's record to its client."""

from __future__ import annotations

import logging

from evalengine.errors import EvalEngineError
from evalengine.harness.served_run import SCORES, ServedRun, recorded, served_key
from evalengine.serve.answering import Submission
from evalengine.serve.asks import Ask
from evalengine.serve.errors import ApiError

logger = logging.getLogger(__name__)
RECEIPT, RUN = "x-evalengine-receipt", "x-evalengine-run"
MOST_NAMED = 64  # choices of one request whose records its answer's header names


class Recorder:
    """Of one server. Used in the event loop alone."""

    def __init__(self, run: ServedRun) -> None:
        self.run = run

    def headers(self, ask: Ask) -> dict[str, str]:
        """The run's name, and the item of each generation, as `prove RUN --item ITEM` takes it."""
        requests = ask.generations([*range(len(ask.choices))])
        keys = {place: served_key(ask.task, recorded(one), one) for place, one in requests.items()}
        named = {"/".join(map(str, key)): None for key in keys.values()}
        receipts = {} if not named or len(named) > MOST_NAMED else {RECEIPT: ", ".join(named)}
        return {RUN: self.run.folder.path.name, **receipts}

    def add(self, submission: Submission) -> None:
        """Keeps a whole answer. Raises ApiError: an answer that is not kept is not given."""
        ask = submission.ask
        numbers = [*range(len(ask.choices))]
        try:
            for prompt, request in ask.scores([*range(len(ask.prompts))]).items():
                self.run.add(SCORES, request, submission.scores[prompt])
            for index, generation in ask.generations(numbers).items():
                self.run.add(ask.task, generation, submission.outputs[index])
        except EvalEngineError as error:
            logger.error("%s", error)
            raise ApiError(500, "the answer could not be recorded; the server's log has why") from error
