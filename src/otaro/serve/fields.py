"""Reading a JSON object from a stranger: every field is taken with what it may be, and what is left is
refused.

null is as good as nothing, since clients send it for what was not set.
"""

from __future__ import annotations

import json
from typing import Any

from otaro.serve.errors import ApiError, wrong

_ABSENT = object()


def parsed(body: bytes) -> dict[str, Any]:
    """The object that a request's body is."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also where it is not UTF-8
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {words}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The fields of one object. `at` is where it lies in the body, for messages."""

    def __init__(self, value: object, at: str = "") -> None:
        if not isinstance(value, dict):
            raise wrong(at, "give an object")
        self._at = at
        self._left = {name: one for name, one in value.items() if one is not None}

    def path(self, name: str) -> str:
        """The field's name as messages give it."""
        return f"{self._at}.{name}" if self._at else name

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not given."""
        return self._left.pop(name, None)

    def required(self, name: str) -> Any:
        """Whatever it is."""
        value = self._left.pop(name, _ABSENT)
        if value is _ABSENT:
            raise wrong(self.path(name), "it is missing")
        return value

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.take(name)
        return None if value is None else checked_text(value, self.path(name))

    def flag(self, name: str) -> bool:
        """Yes or no; no where it is not given."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.path(name), f"give true or false, not {shown(value)}")
        return bool(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(self.path(name), f"give a whole number from {least} to {most}, not {shown(value)}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(self.path(name), f"give a number from {least:g} to {most:g}, not {shown(value)}")
        return float(value)

    def texts(self, name: str, most: int) -> list[str]:
        """A text, or a list of them."""
        value = self.take(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [checked_text(value, self.path(name))]
        if not isinstance(value, list) or len(value) > most:
            raise wrong(self.path(name), f"give a text, or a list of {most} at most")
        return [checked_text(one, f"{self.path(name)}[{number}]") for number, one in enumerate(value)]

    def only(self, name: str, *values: object) -> None:
        """A field that has but one meaning here: other values are refused."""
        value = self.take(name)
        if value is not None and value not in values:
            there = (
                f"; leave it out, or give {' or '.join(map(json.dumps, values))}"
                if values
                else "; leave it out"
            )
            raise wrong(self.path(name), f"this server does not support it{there}", "unsupported_parameter")

    def end(self) -> None:
        """Nothing else may be there."""
        for name in self._left:
            raise wrong(self.path(name)[:200], "there is no such field", "unknown_parameter")


def checked_text(value: object, param: str) -> str:
    """A text that can be written as UTF-8: JSON can escape halves of characters."""
    if not isinstance(value, str):
        raise wrong(param, f"give a text, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(param, "it holds half of a surrogate pair; give whole characters") from None
    return value


def shown(value: object) -> str:
    """A value in a message, cut short."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 40 else f"{text[:40]}..."
