"""An answer that is an error, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

from evalengine.errors import ConfigError, first_of

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
         503: "server_error"}  # fmt: skip
MOST_PROBLEMS, MOST_CHARACTERS = 5, 2000


class ApiError(Exception):
    """Ends a request with an HTTP status, a sentence that says what is wrong, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message[:MOST_CHARACTERS], param, code

    @classmethod
    def of(cls, error: ConfigError) -> ApiError:
        """The answer to a request that cannot be honoured; the first problem names the field that it begins with."""
        field = re.match(r"\w+(?=[=:])", error.problems[0])
        return cls(400, "; ".join(first_of(error.problems, MOST_PROBLEMS)), field and field[0])

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
