"""Errors as a client sees them: a sentence, in the shape of OpenAI's errors.

Owns the kinds of problems and their status codes. A sentence says what to do, and nothing about
the server's internals, which go to its log.
"""

from typing import Any

RETRY_SECONDS = 1
# of what was not foreseen
FAILED = "the server failed: its log says why"
ENDING = "the server is shutting down: ask another one"


class ServeError(Exception):
    """An answer that is an error."""

    status = 500
    kind = "server_error"
    code: str | None = None
    outcome = "failed"
    """Its name in the metrics."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.code = code if code is not None else type(self).code

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class RefusedError(ServeError):
    """The request can never succeed."""

    status, kind, outcome = 400, "invalid_request_error", "refused"


class StatusError(RefusedError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class BusyError(ServeError):
    """Too many requests are waiting."""

    status, kind, code, outcome = 429, "rate_limit_error", "queue_full", "overloaded"


class UnavailableError(ServeError):
    """The server is loading, draining or broken."""

    status, kind, code, outcome = 503, "service_unavailable", "unavailable", "unavailable"


class FailedError(ServeError):
    """The engine failed while it computed this request."""
