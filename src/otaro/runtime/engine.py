"""Several requests at once by one model, each at its own precision: `otaro.Engine`.

    with otaro.Engine(otaro.load("my-model-sefp"), cache_bytes=1 << 30) as engine:
        first = engine.submit("Once upon a time", precision="E5M4")
        other = engine.submit("def read(", precision="E5M8", stop=["return"])
        for token in first: print(token.text, end="")
        print(other.text())

What runs when is decided by `scheduler`, which knows no threads; here is the thread.
"""

from __future__ import annotations

import os
from threading import Event, Lock, Thread, current_thread
from typing import Any, Unpack
from weakref import finalize

from otaro.errors import OtaroError
from otaro.runtime.request import Options, Prompt
from otaro.runtime.scheduler import Scheduler
from otaro.runtime.stream import Stream
from otaro.sefp.precision import Precision


class Engine:
    """Answers requests from a thread of its own; any thread may submit. See the head of this module.

    `max_sequences` run at once, others wait. `cache_bytes` bounds the memory of keys and values, which `kv`
    keeps at a precision instead of in float16. Prompts are read `chunk` tokens at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 16,
        cache_bytes: int | None = None,
        kv: str | Precision | None = None,
        chunk: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Without `cache_bytes` there is memory for 2,048 tokens of every sequence; the tokenizer is the
        model's own.
        """
        self.scheduler = Scheduler(
            model,
            max_sequences=max_sequences,
            cache_bytes=cache_bytes,
            kv=kv,
            chunk=chunk,
            tokenizer=tokenizer,
        )
        wake, closed, self._lock, self._process = Event(), Event(), Lock(), os.getpid()
        self.scheduler.wake, self._closed = wake.set, closed
        self._thread = Thread(
            target=_run, args=(self.scheduler, wake, closed, self._lock), name="otaro engine", daemon=True
        )
        self._thread.start()
        self._stop = finalize(self, _stop, self._thread, self.scheduler, wake, closed, self._process)

    def submit(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """A request, answered as soon as there is memory; refused at once where it can never be.

        - `precision`: one for all of it, a mapping as `otaro.set_precision` takes it, or one from numbers of
          new tokens to precisions, {0: "E5M8", 100: "E5M4"}; or `prefill` for the prompt and `decode` for the
          answer. Without any the model is run as it is set when a step begins.
        - `max_new_tokens`: by default 256, or fewer where a model has no more positions, or the engine no
          more memory.
        - `draft`: who writes ahead, to be checked at the request's precision: a coarser one, "prompt" (what
          followed in the text before) or "prompt+E5M3"; by default nobody.
        - `sampling`: the likeliest tokens, unless an `otaro.Sampling` says otherwise.
        - `stop`: texts and tokens that end the answer and are not part of its text, besides the model's own
          end of text; `ignore_eos` goes on past that.
        - `deadline`: seconds from now after which the answer ends as it is.
        - `logprobs`: 0 for those of the tokens, more for so many of the likeliest as well.
        - `watched`: tokens whose log-probabilities come with every token of the answer, to choose between
          them without any text: `token.watched` of the first one, with `max_new_tokens=1`.
        - `priority`: who has a higher one begins first, then who came first; 0 by default, and it may be
          negative.
        - `text`: False for tokens alone, which needs no tokenizer.
        """
        if odd := options.keys() - Options.__annotations__.keys():
            there = ", ".join(Options.__annotations__)
            raise TypeError(f"Engine.submit() takes no {min(odd)}; what it takes beside the prompt: {there}")
        if self._process != os.getpid():  # its thread is not here, and locks may be held for ever
            raise OtaroError("this engine belongs to the process that made it; make one after the fork")
        with self._lock:
            if self._closed.is_set():
                raise OtaroError("this engine is closed; make another one")
            stream = self.scheduler.submit(prompt, by_thread=True, **options)
            stream.engine = self
            return stream

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        return self.scheduler.context

    @property
    def max_sequences(self) -> int:
        """Requests that can be answered at once."""
        return self.scheduler.max_sequences

    @property
    def alive(self) -> bool:
        """Whether requests are answered; False once it was closed, or broke."""
        return self._thread.is_alive() and not self._closed.is_set()

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return self.scheduler.waiting

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self.scheduler.running

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values now."""
        return self.scheduler.cache_bytes

    @property
    def cache_token_bytes(self) -> float:
        """Of that, the keys and values of one token."""
        return self.scheduler.cache_token_bytes

    def close(self, wait: bool = True) -> None:
        """Take no more requests; those under way are finished, or else cancelled.

        Nothing happens in a forked process, where the engine is not.
        """
        if self._process != os.getpid():
            self._stop.detach()
            return
        with self._lock:
            self._closed.set()
        if not wait:
            self.scheduler.cancel_all()
        self.scheduler.wake()
        self._thread.join()
        self._stop.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)


def _run(scheduler: Scheduler, wake: Event, closed: Event, submitting: Lock) -> None:
    try:
        while True:
            last = closed.is_set()  # before the steps: what came in time is answered
            while scheduler.step():
                pass
            if last:
                return
            wake.wait()
            wake.clear()
    except BaseException as error:
        with submitting:  # a request that came in before this is abandoned too, and none comes after it
            closed.set()
            scheduler.abandon(error)
        raise


def _stop(thread: Thread, scheduler: Scheduler, wake: Event, closed: Event, process: int) -> None:
    """What `close` does for an engine that nobody has any more, or when Python ends."""
    if process != os.getpid():
        return
    closed.set()
    scheduler.cancel_all()
    wake.set()
    if thread is not current_thread():
        thread.join()
