"""Errors of the gateway, in the dialect of the client that caused them.

OpenAI's and Anthropic's SDKs retry 408, 409, 429 and 5xx by themselves, unless a header says that
it is pointless; 400, 401, 403, 404 and 410 end the call.
"""

from __future__ import annotations

from typing import Any, Final

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    410: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Names in both dialects; every other status is an `api_error`."""


class ApiError(Exception):
    """A request that is not served; the message is one line for the agent's developer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Create the error."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """Class of the error, as both dialects name it."""
        return _TYPES.get(self.status, "api_error")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply about another attempt."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": f"{self.retry_after_s:g}", "x-should-retry": "true"}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Error of an invalid body."""
    return ApiError(400, message, param=param)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Body of an error in OpenAI's dialect."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Body of an error in Anthropic's dialect."""
    body: dict[str, Any] = {"type": error.type, "message": error.message}
    if error.code is not None:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}
