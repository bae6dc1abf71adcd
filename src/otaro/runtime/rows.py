"""Rows of tokens that `generate` is writing, and when they end."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria


class Rows:
    """Rows of tokens that grow without being copied each time; `ids` brings them up to date where they are kept."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._prompt = self._written = ids.shape[1]
        self._room = torch.nn.functional.pad(ids, (0, self._prompt + 256))
        self._unwritten: list[list[int]] = []
        self.last: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of a row, those of the prompt included."""
        return self._written + len(self._unwritten)

    @property
    def new(self) -> int:
        """Tokens of a row that were not in the prompt."""
        return self.length - self._prompt

    @property
    def ids(self) -> torch.Tensor:
        """[rows, length]."""
        if self._unwritten:
            if self.length > self._room.shape[1]:
                self._room = torch.nn.functional.pad(self._room, (0, self.length))
            columns = torch.tensor(self._unwritten, dtype=self._room.dtype).t()
            self._room[:, self._written : self.length] = columns.to(self._room.device)
            self._written, self._unwritten = self.length, []
        return self._room[:, : self._written]

    def append(self, tokens: list[int]) -> None:
        """One more token of each row."""
        self._unwritten.append(tokens)
        self.last = tokens


class Stop:
    """Stopping criteria; the two that are nearly always there cost no tensor. Rows end one by one, and are padded then."""

    def __init__(self, criteria: StoppingCriteriaList, rows: int, pad: torch.Tensor | None) -> None:
        self.limit: float = float("inf")
        self.ends: set[int] = set()
        self.others = StoppingCriteriaList()
        self._ended_at: list[int | None] = [None] * rows
        # As in transformers: without an end of text among the criteria, rows that others have ended go on.
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = int(pad) if ends_rows and rows > 1 and pad is not None else None
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.limit = min(self.limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.ends.update(criterion.eos_token_id.flatten().tolist())
            else:
                self.others.append(criterion)

    def padded(self, tokens: list[int]) -> list[int]:
        """These tokens, but padding in rows that have ended."""
        if self._pad is None:
            return tokens
        return [token if end is None else self._pad for token, end in zip(tokens, self._ended_at, strict=True)]

    def __call__(self, tokens: Rows, scores: Any) -> bool:
        """Whether all rows have ended."""
        # All are asked in any case: a criterion may count how often it is.
        others = self.others(tokens.ids, scores).tolist() if self.others else [False] * len(tokens.last)
        for row, (token, other) in enumerate(zip(tokens.last, others, strict=True)):
            if self._ended_at[row] is None and (other or token in self.ends or tokens.length >= self.limit):
                self._ended_at[row] = tokens.new
        return None not in self._ended_at

    def lasted(self, new: int) -> list[int]:
        """How many new tokens of each row are not padding."""
        return [new if self._pad is None or end is None else end for end in self._ended_at]
