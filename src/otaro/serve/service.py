"""Requests become streams of the engine, as many as there are places for, and none is left behind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from otaro.errors import FormatError, OtaroError
from otaro.file.fits import Fit, finest_of, known
from otaro.runtime.draft import Draft
from otaro.runtime.engine import Engine
from otaro.runtime.precision import attachment
from otaro.runtime.request import Prompt, tokens_of
from otaro.runtime.stream import Stream, Token
from otaro.sefp.precision import Precision
from otaro.serve.decisions import Decision, Decisions, answer_tokens, margin, prompt_of
from otaro.serve.errors import ApiError, wrong
from otaro.serve.log import event
from otaro.serve.metrics import Metrics
from otaro.serve.planes import Planes
from otaro.serve.precision import Auto, Plan, Precisions
from otaro.serve.protocol import Ask
from otaro.serve.settings import Settings

_UPKEEP = 1.0  # seconds between two looks at load and planes


class Answers:
    """What one request gets: a stream for each of its choices."""

    def __init__(self, service: Service, ask: Ask, plan: Plan, streams: list[Stream], arrived: float) -> None:
        self.id, self.created = uuid4().hex, int(time.time())
        self.ask, self.plan, self.streams = ask, plan, streams
        self._service, self._arrived, self._first, self._last = service, arrived, 0.0, 0.0

    @property
    def precision(self) -> str:
        """What was computed at so far; the plan's where nothing was."""
        told = self.streams[0].figures.precisions
        if len(told) == len(self.plan.steps) and any(
            isinstance(one, Fit) for one in self.plan.steps.values()
        ):
            return self.plan.told  # by name: the engine tells of a fit from where to where it goes
        return ", then ".join(told) or self.plan.told

    @property
    def prompt_tokens(self) -> int:
        """Of every prompt once, however many answers it has."""
        return sum(stream.figures.prompt_tokens for stream in self.streams[:: self.ask.n])

    @property
    def reused_tokens(self) -> int:
        """Of those, tokens that were in the cache already."""
        return sum(stream.figures.reused_tokens for stream in self.streams[:: self.ask.n])

    @property
    def new_tokens(self) -> int:
        """Of all answers."""
        return sum(len(stream.tokens) for stream in self.streams)

    @property
    def drafted(self) -> tuple[int, int]:
        """Tokens of drafts that were right, and wrong."""
        drafted, right = (
            sum(sum(getattr(one.figures, name)) for one in self.streams) for name in ("drafted", "accepted")
        )
        return right, drafted - right

    async def tokens(self) -> AsyncGenerator[tuple[int, Token | None], None]:
        """Number of the choice and token, as they come; None where a choice has ended."""
        if len(self.streams) == 1:
            async for token in self._tokens(self.streams[0]):
                yield 0, token
            yield 0, None
            return
        ready: asyncio.Queue[tuple[int, Token | None] | Exception] = asyncio.Queue(maxsize=1)

        async def fetch(number: int, stream: Stream) -> None:
            try:
                async for token in self._tokens(stream):
                    await ready.put((number, token))
                await ready.put((number, None))
            except Exception as error:
                await ready.put(error)

        tasks = [asyncio.ensure_future(fetch(*one)) for one in enumerate(self.streams)]
        try:
            left = len(tasks)
            while left:
                found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                left -= found[1] is None
                yield found
        finally:
            for task in tasks:
                task.cancel()

    async def _tokens(self, stream: Stream) -> AsyncIterator[Token]:
        async for token in stream:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            yield token
        if stream.finish_reason == "cancelled":
            raise ApiError(503, "the server ended before the answer did; ask again")
        if stream.finish_reason == "deadline" and not stream.tokens:
            raise ApiError(504, f"there was no answer within {self._service.settings.timeout:g} seconds")

    def close(self) -> None:
        """Nobody waits for it any more: what is still being computed is stopped."""
        for stream in self.streams:
            if stream.finish_reason is None:
                stream.cancel()
        self._service.close(self)

    def record(self, metrics: Metrics) -> None:
        """Count it."""
        at = str(self.plan.steps[0]) if len(self.plan.steps) == 1 else "mixed"
        metrics.prompt_tokens.labels(at).inc(self.prompt_tokens)
        metrics.reused_tokens.labels(at).inc(self.reused_tokens)
        metrics.new_tokens.labels(at).inc(self.new_tokens)
        for stream in self.streams:
            metrics.endings.labels(stream.finish_reason or "cancelled").inc()
            metrics.switches.inc(max(len(stream.figures.precisions) - 1, 0))
        if self._first:
            metrics.first_token.labels(at).observe(self._first - self._arrived)
            longest = max(len(stream.tokens) for stream in self.streams)
            if longest > 1:
                metrics.per_token.labels(at).observe((self._last - self._first) / (longest - 1))


class Service:
    """A model and its engine, with everything that a server decides about requests."""

    def __init__(self, model: Any, engine: Engine, name: str, settings: Settings) -> None:
        """The engine is closed with the service."""
        self.settings, self.engine, self.metrics = settings, engine, Metrics()
        self.planes = Planes(model, settings.release_after)
        self.tokenizer = engine.scheduler.tokenizer
        self.places = engine.max_sequences
        auto = Auto(self._auto_bounds, settings.auto_interval)
        nested = attachment(model).nested
        self.precisions = Precisions(
            name, lambda: self.planes.finest, settings.precision, auto, self.planes.fits
        )
        if settings.precision not in (None, "auto"):
            nested.require(finest_of(known(nested, settings.precision or "")))
        self.started = int(time.time())
        self.ending = False
        self._taken = 0  # places in the engine and its queue
        self._open: dict[str, Answers] = {}
        # One thread: a tokenizer is not to be used by several at once, and a long prompt must not hold up the
        # loop.
        self._tokenizing = ThreadPoolExecutor(1, "otaro tokenizer")
        self._watch()

    # Beginning and ending an answer

    async def begin(self, ask: Ask, arrived: float) -> Answers:
        """Streams for a request, or a refusal; `close` is the caller's."""
        self._look_at_load()
        plan, most = self.precisions.plan(ask.model, ask.precision), self.settings.max_tokens
        if most is not None and (ask.max_tokens or 0) > most:
            raise wrong(ask.limit_field, f"{ask.max_tokens} are too many; this server writes {most} at most")
        self._admit(ask.choices)
        try:
            streams = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, self._submit, ask, plan
            )
        except BaseException:
            self._taken -= ask.choices
            raise
        answers = Answers(self, ask, plan, streams, arrived)
        self._open[answers.id] = answers
        return answers

    @property
    def open_answers(self) -> int:
        """Requests whose answers are under way."""
        return len(self._open)

    def close(self, answers: Answers) -> None:
        """Its places are free; called by the answers."""
        if self._open.pop(answers.id, None) is not None:
            self._taken -= len(answers.streams)
            answers.record(self.metrics)

    def switch(self, name: str, value: object) -> Precision | Fit:
        """Go on with an answer at another precision."""
        precision = self.precisions.one(value)
        if name not in self._open:
            raise ApiError(
                404, "there is no such answer under way; it may have ended", code="answer_not_found"
            )
        self.planes.use(precision)
        for stream in self._open[name].streams:
            stream.set_precision(precision)
        return precision

    def _admit(self, wanted: int) -> None:
        if self.ending or not self.engine.alive:
            raise ApiError(503, "the server is about to end; ask another one", headers={"retry-after": "5"})
        room = self.places + self.settings.max_queue
        if wanted > room:
            raise wrong("n", f"{wanted} answers at once are more than this server has places for ({room})")
        if self._taken + wanted > room:
            after = str(1 + max(self._taken - self.places, 0) // self.places)
            message = f"the server is busy: {self._taken} answers are being written or wait; ask again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": after})
        self._taken += wanted

    def _submit(self, ask: Ask, plan: Plan) -> list[Stream]:
        """By the tokenizer's thread."""
        streams: list[Stream] = []
        try:
            prompts = [self.tokens(prompt, ask.prompt_field) for prompt in ask.prompts]
            for precision in plan.steps.values():
                self.planes.use(precision)
            draft = self._draft(ask, plan)
            for ids in prompts:
                limit = self._limit(ask, len(ids))
                for number in range(ask.n):
                    streams.append(
                        self.engine.submit(
                            ids,
                            precision=dict(plan.steps),
                            max_new_tokens=limit,
                            draft=draft,
                            sampling=ask.sampling_of(number),
                            stop=ask.stop,
                            ignore_eos=ask.ignore_eos,
                            logprobs=ask.logprobs,
                            deadline=self.settings.timeout,
                        )
                    )
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            raise self.refusal(error) from error
        return streams

    def _draft(self, ask: Ask, plan: Plan) -> Draft | None:
        """The request's, or the server's as far as it is of use."""
        if ask.draft is not None:
            return None if ask.draft == Draft() else ask.draft
        ours = Draft.of(self.settings.draft)
        if (
            ours is None
            or ours.precision is None
            or ours.precision < max(map(finest_of, plan.steps.values()))
        ):
            return ours
        return Draft(prompt=True) if ours.prompt else None

    def tokens(self, prompt: Prompt, field: str) -> list[int]:
        """Tokens of a prompt that may be read."""
        if not isinstance(prompt, str) and isinstance(prompt[0], dict) and not self.tokenizer.chat_template:
            raise wrong(field, "this model has no chat template; ask it at /v1/completions")
        try:
            ids = tokens_of(prompt, lambda: self.tokenizer, self.engine.scheduler.decoder.vocabulary)
        except OtaroError as error:
            raise wrong(field, str(error)) from error
        most = min(self.settings.max_prompt_tokens or self.engine.context, self.engine.context)
        if len(ids) > most:
            raise wrong(
                field, f"{len(ids)} tokens are too many; {most} can be read", "context_length_exceeded"
            )
        return ids

    def _limit(self, ask: Ask, prompt: int) -> int:
        """New tokens at most."""
        wanted, left = ask.max_tokens, self.engine.context + 1 - prompt
        if wanted is not None and wanted > left:
            told = (
                f"the prompt has {prompt} tokens, so that there is room for {left} new ones, not for {wanted}"
            )
            raise wrong(ask.limit_field, told, "context_length_exceeded")
        return wanted or min(left, self.settings.max_tokens or left, ask.usual_tokens)

    def refusal(self, error: BaseException) -> BaseException:
        """What a client is told of an error; paths and prompts stay here."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, OtaroError) and not isinstance(error, FormatError):
            return ApiError(400, str(error))
        return error

    # Decisions

    async def decide(self, asked: Decisions) -> list[Decision]:
        """What the model makes of every question.

        One question after the other, so that each finds the state that they share in the cache.
        """
        plan = self.precisions.plan(asked.model, asked.precision)
        coarsest, finest = self._auto_bounds()
        first = coarsest if plan.auto else plan.steps[0]
        until = time.monotonic() + self.settings.timeout
        self._admit(1)
        try:
            prompts = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, self._questions, asked
            )
            made = [
                Decision(len(one[0]), first, await self._probabilities(*one, first, until)) for one in prompts
            ]
            for number, one in enumerate(prompts):
                if (
                    plan.auto
                    and coarsest < finest
                    and margin(made[number].probabilities) < self.settings.auto_margin
                ):
                    made[number] = Decision(
                        len(one[0]), finest, await self._probabilities(*one, finest, until)
                    )
                    self.metrics.escalated.inc()
        finally:
            self._taken -= 1
        for decision in made:
            self.metrics.decisions.labels(str(decision.precision)).inc()
        return made

    def _questions(self, asked: Decisions) -> list[tuple[list[int], list[list[int]]]]:
        """By the tokenizer's thread: the tokens of each prompt, and those of its answers."""
        found = []
        for one in asked.questions:
            answers = answer_tokens(one, self.tokenizer)
            ids = self.tokens(prompt_of(asked.state, one, self.tokenizer), one.path)
            if len(ids) + max(map(len, answers)) > self.engine.context:
                raise wrong(
                    one.path,
                    f"with its answers it has more than {self.engine.context} tokens",
                    "context_length_exceeded",
                )
            found.append((ids, answers))
        return found

    async def _probabilities(
        self, ids: list[int], answers: list[list[int]], precision: Precision | Fit, until: float
    ) -> list[float]:
        """Of each answer to follow the prompt, if one of them does."""
        totals = await self._logprobs(ids, [answer[0] for answer in answers], precision, until)
        self.metrics.prompt_tokens.labels(str(precision)).inc(len(ids))
        for number, answer in enumerate(answers):
            for at in range(1, len(answer)):  # each after those before it, which the cache holds
                (more,) = await self._logprobs([*ids, *answer[:at]], [answer[at]], precision, until)
                totals[number] += more
        shares = [math.exp(total - max(totals)) for total in totals]
        return [share / sum(shares) for share in shares]

    async def _logprobs(
        self, ids: list[int], tokens: list[int], precision: Precision | Fit, until: float
    ) -> list[float]:
        """Of each of these tokens to be the next."""
        self.planes.use(precision)
        left = max(until - time.monotonic(), 1e-3)
        stream = self.engine.submit(
            ids, precision=precision, watched=tokens, max_new_tokens=1, text=False, deadline=left
        )
        try:
            async for token in stream:
                self.metrics.reused_tokens.labels(str(precision)).inc(stream.figures.reused_tokens)
                return list(token.watched)
        finally:
            if stream.finish_reason is None:
                stream.cancel()
        if stream.finish_reason == "deadline":
            raise ApiError(504, f"there was no answer within {self.settings.timeout:g} seconds")
        raise ApiError(503, "the server ended before the answer did; ask again")

    # What goes on beside

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looks after load and planes meanwhile; ends the engine after it."""
        upkeep = asyncio.ensure_future(self._upkeep())
        try:
            yield
        finally:
            self.ending = True
            upkeep.cancel()
            self._tokenizing.shutdown(wait=False)
            await asyncio.to_thread(self.engine.close, wait=False)

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP)
            try:
                self._look_at_load()
                await asyncio.to_thread(self.planes.look)
                self.metrics.released.inc(await asyncio.to_thread(self.planes.release))
            except Exception as error:  # the next look may go better
                event("upkeep failed", error=type(error).__name__)

    def _look_at_load(self) -> None:
        self.precisions.auto.look(self.engine.waiting, self.engine.running, self.places)

    def _auto_bounds(self) -> tuple[Precision, Precision]:
        finest = self.planes.finest
        if self.settings.auto_finest:
            finest = min(finest, Precision(self.settings.auto_finest))
        return min(Precision(self.settings.auto_coarsest), finest), finest

    def _watch(self) -> None:
        gauge, engine = self.metrics.gauge, self.engine
        gauge("otaro_waiting", "Answers that wait for a place.", lambda: engine.waiting)
        gauge("otaro_running", "Answers that are being written.", lambda: engine.running)
        gauge("otaro_cache_bytes", "Memory of keys and values.", lambda: engine.cache_bytes)
        gauge(
            "otaro_auto_mantissa_bits",
            "What precision auto stands for.",
            lambda: self.precisions.auto.now.mantissa_bits,
        )
        gauge("otaro_auto_switches", "Steps of precision auto so far.", lambda: self.precisions.auto.switches)
        gauge(
            "otaro_finest_mantissa_bits",
            "The finest precision that is there.",
            lambda: self.planes.finest.mantissa_bits,
        )
