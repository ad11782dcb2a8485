"""Keeps what a server answers as a run, and names each answer's record to its client."""

from __future__ import annotations

import logging

from evalengine.errors import EvalEngineError
from evalengine.integrations.openai_server.answering import Submission
from evalengine.integrations.openai_server.asks import Ask
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.served_run import SCORES, ServedRun, recorded, served_key

logger = logging.getLogger(__name__)
RECEIPT, RUN = "x-evalengine-receipt", "x-evalengine-run"
MOST_NAMED = 64  # choices of one request whose records its answer's header names


class Recorder:
    """Of one server. Used in the event loop alone."""

    def __init__(self, run: ServedRun) -> None:
        self.run = run
        self._reported = False  # that answers cannot be recorded

    def headers(self, ask: Ask) -> dict[str, str]:
        """The run's name, and the item of each generation, as `prove RUN --item ITEM` takes it."""
        requests = ask.generations([*range(len(ask.choices))])
        keys = {place: served_key(ask.task, recorded(one), one) for place, one in requests.items()}
        named = {"/".join(map(str, key)): None for key in keys.values()}
        receipts = {} if not named or len(named) > MOST_NAMED else {RECEIPT: ", ".join(named)}
        return {RUN: self.run.folder.path.name, **receipts}

    def check(self, thorough: bool = False) -> None:
        """Raises ApiError while answers cannot be recorded.

        thorough: also if the last ones could be. A full disk is found by writing to it, which takes some system calls.
        """
        if (self._reported or thorough) and (why := self.run.problem()) is not None:
            self._report(why)
            raise ApiError(503, f"answers cannot be recorded: {why}")
        if self._reported:
            logger.warning("answers are recorded again")
            self._reported = False

    def add(self, submission: Submission) -> None:
        """Keeps a whole answer. Raises ApiError: an answer that is not kept is not given."""
        ask = submission.ask
        scores = [(SCORES, request, submission.scores[prompt])
                  for prompt, request in ask.scores([*range(len(ask.prompts))]).items()]  # fmt: skip
        answers = [(ask.task, request, submission.outputs[index])
                   for index, request in ask.generations([*range(len(ask.choices))]).items()]  # fmt: skip
        try:
            self.run.add([*scores, *answers])
        except EvalEngineError as error:
            if isinstance(cause := error.__cause__, OSError):
                self._report(cause.strerror or str(cause))
                raise ApiError(503, "the answer could not be recorded; come back later") from error
            logger.error("%s", error)
            raise ApiError(500, "the answer could not be recorded; the server's log has why") from error

    def _report(self, why: str) -> None:
        """Logs why answers cannot be recorded, once until they can be."""
        if not self._reported:
            logger.error("%s: answers cannot be recorded (%s), and requests are answered 503 until they can",
                         self.run.folder.path, why)  # fmt: skip
            self._reported = True
