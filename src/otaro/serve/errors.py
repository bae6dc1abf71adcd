"""What clients are told when something is refused: OpenAI's error shape, and the field's name in it."""

from __future__ import annotations

from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal of one request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`param` is the field that was wrong, `code` a word that programs may look for."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            headers or {},
        )

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that is not as it should be."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)
