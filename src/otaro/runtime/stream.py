"""Tokens of one answer, as they come: what `Engine.submit` returns.

    for token in stream: print(token.text, end="", flush=True)
    async for token in stream: ...
    stream.text()                                   # waits for all of it

Whoever writes never waits for whoever reads: tokens are kept, and may be read any number of times.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Condition
from typing import NamedTuple

from otaro.errors import OtaroError
from otaro.runtime.precision import PrecisionLike
from otaro.runtime.report import Generation


class Token(NamedTuple):
    """One token of an answer."""

    id: int
    text: str
    """What can be told now: empty while a character is incomplete, or while a stop may have begun."""
    logprob: float | None = None
    """Its log-probability by the model, before any sampling; only where it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """As many of the likeliest tokens as were asked for, with their log-probabilities."""
    watched: tuple[float, ...] = ()
    """Log-probabilities of the tokens to watch, in their order, where the request named some."""


class Answer(NamedTuple):
    """All of an answer."""

    text: str
    tokens: list[int]
    finish_reason: str
    figures: Generation


class Stream:
    """One answer. Iterating waits for its tokens; if it failed, the error is raised after the last one."""

    def __init__(
        self,
        set_precision: Callable[[PrecisionLike], None],
        wake: Callable[[], None],
        drive: Callable[[], object] | None,
    ) -> None:
        """`drive` makes the next step where no thread does."""
        self.figures = Generation(served_by="decoder")
        self.finish_reason: str | None = None
        """None while it goes on; then stop, length, cancelled, deadline or error."""
        self.stopped_by: str | int | None = None
        """The text or token of `stop`, or the end-of-text token, that it came to."""
        self.error: BaseException | None = None
        self.cancelled = False
        self.engine: object = None
        """Whose thread writes it: it must stay as long."""
        self._set_precision, self._wake, self._drive = set_precision, wake, drive
        self._process = os.getpid()
        self._tokens: list[Token] = []
        self._changed = Condition()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def cancel(self) -> None:
        """Stop; its memory is free at the next step."""
        self.cancelled = True
        self._wake()

    def set_precision(self, precision: PrecisionLike) -> None:
        """Go on at this precision from the next step on, whatever schedule there was. The cache is kept."""
        self._set_precision(precision)

    @property
    def tokens(self) -> list[int]:
        """Those so far, with the one that ended it."""
        return [token.id for token in self._tokens]

    def text(self) -> str:
        """All of the text, without what stopped it; waits for its end."""
        return "".join(token.text for token in self)

    def result(self) -> Answer:
        """All of the answer; waits for its end."""
        text = self.text()
        assert self.finish_reason is not None
        return Answer(text, self.tokens, self.finish_reason, self.figures)

    def __iter__(self) -> Iterator[Token]:
        for number in count():
            while not self._knows(number):
                if self._drive is not None:
                    self._drive()
                else:
                    self._check_process()
                    with self._changed:
                        self._changed.wait_for(partial(self._knows, number))
            if (token := self._at(number)) is None:
                return
            yield token

    async def __aiter__(self) -> AsyncIterator[Token]:
        for number in count():
            await asyncio.sleep(0)  # tokens that are there already must not keep the loop from all else
            while not self._knows(number):
                if self._drive is not None:
                    self._drive()
                    continue
                self._check_process()
                sleeper = (asyncio.get_running_loop(), asyncio.Event())
                with self._changed:
                    if self._knows(number):
                        break
                    self._sleepers.append(sleeper)
                await sleeper[1].wait()
            if (token := self._at(number)) is None:
                return
            yield token

    def put(self, token: Token) -> None:
        """For the scheduler: one more."""
        with self._changed:
            self._tokens.append(token)
            self._tell()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """For the scheduler: there will be no more."""
        with self._changed:
            self.finish_reason, self.error = reason, error
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for loop, event in sleepers:
            with suppress(RuntimeError):  # a loop that has ended meanwhile
                loop.call_soon_threadsafe(event.set)

    def _check_process(self) -> None:
        """Refuse to wait in a forked process, where no thread writes it."""
        if self._process != os.getpid():
            raise OtaroError(
                "this answer belongs to the process that asked for it; make an engine after the fork, and "
                "ask there"
            )

    def _knows(self, number: int) -> bool:
        """Whether this token is there, or never will be."""
        return number < len(self._tokens) or self.finish_reason is not None

    def _at(self, number: int) -> Token | None:
        if number < len(self._tokens):
            return self._tokens[number]
        if self.error is not None:
            raise self.error
        return None
