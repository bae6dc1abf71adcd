"""Text of tokens as they come: whole characters only, and nothing that may be the beginning of a stop.

What a token says depends on its neighbours: a character may be spread over several, and some tokenizers drop
a space at the beginning of what they decode. So a token is decoded together with those before it, and what is
new in the text is its piece. A piece is empty while a character is incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BEFORE = 6  # tokens of the prompt that decide how the first new one reads
_WAIT = 16  # tokens after which an incomplete character will not be completed
_INCOMPLETE = "\ufffd"


class Pieces:
    """The text of one answer, piece by piece. `"".join` of them is all of it, up to its stop."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(prompt[-_BEFORE:])
        self._context = 0  # tokens from here on are decoded,
        self._told = len(self._ids)  # and those up to here were told
        self._before = self._decoded(self._told)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop that the text came to."""

    def add(self, token: int) -> str:
        """What can be told after this token."""
        self._ids.append(token)
        text = self._decoded(len(self._ids))
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._told < _WAIT:
            return ""
        return self._checked(self._advance(text))

    def end(self) -> str:
        """What was held back, if the text ends here."""
        rest = self._checked(self._advance(self._decoded(len(self._ids))))
        rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._context : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _advance(self, text: str) -> str:
        piece, told = text[len(self._before) :], self._told
        self._told = len(self._ids)
        if piece or told - self._context > _WAIT:  # tokens that say nothing are no context for the next one
            self._context = told
            self._before = self._decoded(self._told)
        return piece

    def _checked(self, piece: str) -> str:
        """As much of it as cannot be part of a stop."""
        text, self._held = self._held + piece, ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.stopped_by = min(found)
            return text[:at]
        for start in range(max(0, len(text) - max(map(len, self._stops), default=1) + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                self._held = text[start:]
                return text[:start]
        return text
