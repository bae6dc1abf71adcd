"""How many tokens a second several sequences make together: `otaro bench --parallel 1,2,4,8,16`.

A contender is a number of sequences at a precision, run by the engine. Sequences at *mixed* precisions take
the precisions in turn, one after the other, and share a pass over the weights as the CPU can. Each has its
own prompt, which was read before the clock starts, so that only decoding is timed. As in `speed`, contenders
take turns: a round is one turn of each, the first warms up, figures are medians, and gains are medians of
ratios within rounds.

Beside them stands one sequence read by the decoder alone, which shows what the engine costs, and llama.cpp if
asked for, which decodes as many sequences in one batch.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from otaro.errors import OtaroError
from otaro.evaluate.llama_cpp import KINDS, LlamaBatch, gguf_file
from otaro.evaluate.machine import Cpu, Measured, about, in_turns
from otaro.evaluate.progress import Progress
from otaro.evaluate.speed import Named, Settings, open_at, random_ids, threads_for_a_while
from otaro.file.checkpoint import HUB
from otaro.file.fits import Fit
from otaro.file.hub import Hub
from otaro.runtime.architectures import packed_modules
from otaro.runtime.load import load
from otaro.runtime.precision import attachment, chosen_bits
from otaro.runtime.scheduler import Scheduler
from otaro.runtime.serving import decoder_of
from otaro.sefp.precision import Precision

ALONE = "decoder alone"
MIXED = "mixed"


@dataclass(frozen=True)
class Together:
    """Some sequences of one kind; speeds in tokens per second."""

    what: str
    """A precision, mixed, the decoder alone, or another engine."""
    sequences: int
    total: float
    each: float
    gain: float | None
    """Times the tokens of one sequence of the same kind; None where none was timed."""
    seconds: list[float]
    """Round by round."""


@dataclass(frozen=True)
class Parallel(Measured):
    """Everything `otaro bench --parallel` shows."""

    settings: Settings
    cache_bytes: int
    """Of keys and values of all sequences, at the end."""
    rows: list[Together]


Prompts = list[list[int]]
Turn = Callable[[], tuple[float, int]]
"""Seconds, and tokens made in them."""


def bench(
    directory: str,
    counts: Sequence[int],
    settings: Settings,
    precisions: Named = None,
    *,
    device: str = "cpu",
    with_llama: bool = False,
    hub: Hub = HUB,
    progress: Progress = lambda what, done, total: None,
) -> Parallel:
    """Measure so many sequences at once at some precisions, by default at all that the directory has."""
    if not counts or min(counts) < 1 or len(set(counts)) != len(counts):
        raise OtaroError("--parallel: give numbers of sequences, such as 1,2,4,8")
    if settings.context < 2 or settings.tokens < 2:
        raise OtaroError("--parallel: prompts need a --context of 2, and --tokens 2, at least")
    place, nested, chosen = open_at(directory, precisions, device, hub, with_llama)
    with ExitStack() as stack:
        threads = stack.enter_context(threads_for_a_while(settings.threads))
        model = load(nested.path, chosen[-1], device=place.device)
        scheduler = Scheduler(model, max_sequences=max(counts), kv=settings.kv)
        if (wanted := settings.context + settings.tokens) > scheduler.context:
            told = f"--context {settings.context} and --tokens {settings.tokens} take {wanted}"
            raise OtaroError(f"a sequence has {scheduler.context} positions here, but {told}")
        ids, length = random_ids(model.config.vocab_size, max(counts) * settings.context), settings.context
        prompts = [ids[start : start + length] for start in range(0, len(ids), length)]
        tokens, turns = settings.tokens, dict[tuple[str, int], Turn]()
        for precision in chosen:
            turns[ALONE + f" at {precision}", 1] = _alone(place, model, prompts[0], precision, settings)
            for count in counts:
                turns[str(precision), count] = _ours(place, scheduler, prompts[:count], [precision], tokens)
            if with_llama and (kind := KINDS.get(str(precision))) is not None:
                path = gguf_file(nested, kind, Path(stack.enter_context(tempfile.TemporaryDirectory())))
                theirs = LlamaBatch(path, threads=threads, positions=wanted + 1, sequences=max(counts))
                stack.callback(theirs.close)
                for count in counts:
                    turns[f"llama.cpp {kind}", count] = _theirs(place, theirs, prompts[:count], tokens)
        for count in counts:
            if len(chosen) > 1 and count > 1:
                turns[MIXED, count] = _ours(place, scheduler, prompts[:count], chosen, tokens)
        total, done = (1 + settings.rounds) * len(turns), itertools.count()

        def say(key: tuple[str, int]) -> None:
            progress(f"{key[0]}, {key[1]} at once", next(done), total)

        timed = in_turns(turns, settings.rounds, say)
        progress("", total, total)
        seconds = {key: [taken / tokens for taken, tokens in rounds] for key, rounds in timed.items()}
        return Parallel(
            **about(nested, place, threads),
            settings=settings,
            cache_bytes=scheduler.cache_bytes,
            rows=[_row(what, count, seconds) for what, count in turns],
        )


def _row(what: str, count: int, seconds: dict[tuple[str, int], list[float]]) -> Together:
    """`seconds` are those of a token of all sequences together, round by round."""
    mine, one = seconds[what, count], seconds.get((what, 1))
    total = 1 / median(mine)
    gain = None if one is None else median(alone / both for alone, both in zip(one, mine, strict=True))
    return Together(what, count, total, total / count, gain, mine)


def _ours(
    place: Cpu, scheduler: Scheduler, prompts: Prompts, precisions: Sequence[Precision | Fit], tokens: int
) -> Turn:
    pairs = list(zip(prompts, itertools.cycle(precisions), strict=False))

    def submitted(count: int) -> list[Any]:
        submit = partial(scheduler.submit, max_new_tokens=count, ignore_eos=True, text=False)
        return [submit(prompt, precision=precision) for prompt, precision in pairs]

    def finish() -> None:
        while scheduler.step():
            pass

    def turn() -> tuple[float, int]:
        submitted(1)
        finish()  # prompts are read, and found again in the cache below
        streams = submitted(tokens + 1)
        while not all(stream.tokens for stream in streams):
            scheduler.step()
        before = sum(len(stream.tokens) for stream in streams)
        seconds = place.seconds(finish)
        return seconds, sum(len(stream.result().tokens) for stream in streams) - before

    return turn


def _alone(place: Cpu, model: Any, prompt: list[int], precision: Precision | Fit, settings: Settings) -> Turn:
    decoder: Any = decoder_of(model)
    chosen = chosen_bits(attachment(model), precision)
    bits = bytes([chosen[module] for module in packed_modules(model)])
    cache = decoder.new_cache(settings.kv, 1, settings.context + settings.tokens)

    def turn() -> tuple[float, int]:
        cache.crop(0)
        token = int(decoder.forward(prompt, cache, bits=bits).argmax())

        def decode() -> None:
            next_token = token
            for _ in range(settings.tokens):
                next_token = int(decoder.forward([next_token], cache, bits=bits).argmax())

        return place.seconds(decode), settings.tokens

    return turn


def _theirs(place: Cpu, engine: LlamaBatch, prompts: Prompts, tokens: int) -> Turn:
    def turn() -> tuple[float, int]:
        first = [engine.read(number, prompt) for number, prompt in enumerate(prompts)]
        return place.seconds(lambda: engine.go_on(first, tokens)), tokens * len(prompts)

    return turn
