"""`otaro bench`: how fast a nested model runs at each precision, what bounds it, and how others do.

Every contender reads the same tokens, drawn at random with a fixed seed, and takes turns with the others: a
round is one turn of each, so a machine that slows down for a while slows down for all. A turn times the
prompt as a whole (prefill), then goes back to `context` tokens and times further ones singly (decode). A
first round warms up and is not counted; figures are medians over the others, and ratios are medians of the
ratios within rounds.

Decoding reads every weight once per token, so its time is compared with that of reading memory. The bytes per
token are base nibbles, planes and scales of all matrices as they lie in memory, of experts those that a token
takes, plus the keys and values of the tokens before. An embedding counts where it is also the head; a single
row of it, norms and biases are left out. The yardstick is a plain read of a buffer larger than caches are, on
as many threads, which takes its turn in every round; on a GPU it is a copy by a kernel, bytes read and
written counted.

A model outside the decode path may take seconds for a token. Its turn is estimated from a few tokens first;
where all turns would take more than `BUDGET`, rounds are cut, then tokens, and the result says so
(`cut_from`).

Memory is what the process has grown by since before the model was opened; on a GPU, what tensors there have.
The warm-up goes from the coarsest precision to the finest, each mapping one more shard, so that every figure
is that of a process which never ran at a finer one. A GPU is waited for before a clock is looked at.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.engines import Engine, Forward, engine_for, plain_model
from otaro.evaluate.llama_cpp import KINDS, LlamaCpp, gguf_file, library
from otaro.evaluate.machine import Cpu, Measured, about, in_turns, processor
from otaro.evaluate.progress import Progress
from otaro.file.checkpoint import HUB, resolve_nested
from otaro.file.fits import Fit, bytes_of, finest_of, is_fit, known
from otaro.file.header import BASE, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.runtime.footprint import weight_bytes_per_token
from otaro.runtime.load import load
from otaro.runtime.precision import set_precision
from otaro.sefp.precision import PRECISIONS, Precision

Named = Sequence[str | Precision] | None
"""Precisions and fits that are asked for; None for all precisions."""

TRANSFORMERS = "transformers"
PLAIN = "plain access to memory"
DECODE_PATH = "decode path"
READ_BYTES = 1 << 28
SWITCHES = 200
BUDGET = 180.0  # seconds for a model outside the decode path
_TRIED = 16  # tokens of a prompt by which its time is estimated


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    prompt_tokens: int = 500
    tokens: int = 64
    context: int = 256
    """Tokens in the cache when decoding starts."""
    rounds: int = 5
    threads: int | None = None
    """None for torch's number."""
    kv: Precision | None = None
    """The precision of keys and values; None for float16."""

    @property
    def positions(self) -> int:
        """The longest sequence it takes."""
        return max(self.prompt_tokens, self.context + self.tokens)

    def seconds(self, prompt_token: float, token: float) -> float:
        """What a turn takes, if a token of a prompt and one that is decoded take so long."""
        return max(self.prompt_tokens, self.context) * prompt_token + self.tokens * token

    def within(self, budget: float, prompt_token: float, token: float, contenders: int) -> Settings:
        """These settings, or fewer rounds, then fewer tokens, so that all turns fit into `budget` seconds."""
        turns = contenders * self.seconds(prompt_token, token)
        rounds = min(self.rounds, max(1, int(budget / turns) - 1))  # and one that warms up
        share = min(1.0, budget / (turns * (1 + rounds)))
        prompt, tokens = (max(1, int(count * share)) for count in (self.prompt_tokens, self.tokens))
        context = int(self.context * share)
        return replace(self, rounds=rounds, prompt_tokens=prompt, context=context, tokens=tokens)


@dataclass
class Rounds:
    """Seconds of one contender, round by round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Contender:
    """Tokens per second of one contender, and the bytes of its weights."""

    name: str
    weight_bytes: int
    prefill: float
    decode: float
    rounds: Rounds


@dataclass(frozen=True)
class PrecisionSpeed:
    """All that is measured of one precision: bytes, tokens per second, seconds."""

    precision: str
    prefill: float
    decode: float
    weight_bytes: int
    """Read per token."""
    kv_bytes: int
    """Of keys and values read per token, on average over the tokens timed."""
    bandwidth: float
    """Bytes read per second while decoding."""
    bandwidth_share: float
    """Of a plain read of memory."""
    resident_bytes: int | None
    """Growth of memory (a GPU's) since before the model was opened; None where the system tells none."""
    file_bytes: int
    kv_cache_bytes: int
    """Held at the end of a turn, when memory is looked at."""
    switch: float | None
    """To switch to this precision from another one."""
    rounds: Rounds


@dataclass(frozen=True)
class Ratio:
    """A precision beside another engine: how many times as fast, as the median over rounds."""

    precision: str
    against: str
    prefill: float
    decode: float


@dataclass(frozen=True)
class Bench(Measured):
    """Everything `otaro bench` shows."""

    path: str
    """What computes a token: our decode path, or transformers and why."""
    kv_type: str
    """Of keys and values."""
    settings: Settings
    read_bandwidth: float
    """Of a plain read of memory; on a GPU, of a plain copy."""
    graph_bytes: int | None
    """Of what was captured on a GPU to be launched at once, for all precisions."""
    precisions: list[PrecisionSpeed]
    others: list[Contender]
    ratios: list[Ratio]
    cut_from: Settings | None = None
    """What was asked for, where it would have taken too long."""


def bench(
    directory: str,
    settings: Settings,
    precisions: Named = None,
    *,
    device: str = "cpu",
    with_transformers: bool = False,
    with_llama: bool = False,
    hub: Hub = HUB,
    progress: Progress = lambda what, done, total: None,
) -> Bench:
    """Measure a nested model at some precisions, by default all, beside other engines if asked."""
    place, nested, chosen = open_at(directory, precisions, device, hub, with_llama)
    on_gpu = place.kind == "cuda"
    kinds = [KINDS[str(p)] for p in chosen if with_llama and str(p) in KINDS]
    contenders = len(chosen) + with_transformers + len(kinds)
    asked = settings
    with ExitStack() as stack:
        threads = stack.enter_context(threads_for_a_while(settings.threads))
        _check_positions(load(nested.path, chosen[-1]).config, settings)
        # the model is gone again, what Python imported for it stays and does not count
        before = place.held_bytes()
        model = load(nested.path, chosen[-1], device=place.device)
        ids = random_ids(model.config.vocab_size, settings.positions)
        ours, why_not = engine_for(model, settings.kv, settings.positions, on_gpu)
        if why_not:
            settings = settings.within(BUDGET, *_token_seconds(place, ours, ids), contenders)
        turns: dict[str, Callable[[], tuple[float, float]]] = {}
        total, done = (1 + settings.rounds) * contenders + settings.rounds, itertools.count()

        def say(name: str) -> None:
            progress(name, next(done), total)

        def add(name: str, engine: Engine, prepare: Callable[[], object] = lambda: None) -> None:
            """Its warm-up is now."""
            turns[name] = partial(_turn, place, engine, ids, settings, prepare)
            in_turns({name: turns[name]}, 0, say)

        grown: dict[str, int | None] = {}
        for precision in reversed(chosen):
            add(str(precision), ours, partial(set_precision, model, precision))
            now = place.held_bytes()
            grown[str(precision)] = None if now is None or before is None else now - before
        others: dict[str, int] = {}
        if with_transformers:
            plain = plain_model(model, torch.float16 if on_gpu else torch.float32)
            others[TRANSFORMERS] = sum(tensor.nbytes for tensor in plain.parameters())
            add(TRANSFORMERS, Forward(plain))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="otaro-gguf-")))
        for kind in kinds:
            progress(f"a GGUF file of type {kind}", len(turns), total)
            path = gguf_file(nested, kind, folder)
            engine = LlamaCpp(path, threads=threads, positions=settings.positions)
            stack.callback(engine.close)
            others[_llama(kind)] = path.stat().st_size
            add(_llama(kind), engine)
        read, moved = place.plain_access(READ_BYTES)
        read()
        order = {name: turns[name] for name in sorted(turns, key=_neighbours)}
        order[PLAIN] = lambda: (0.0, place.seconds(read))
        timed = in_turns(order, settings.rounds, say, warm=True)
        progress("", total, total)
        rounds = {name: Rounds(*map(list, zip(*found, strict=True))) for name, found in timed.items()}
        read_bandwidth = moved / median(rounds[PLAIN].decode)
        switches, rows = switch_times(model, chosen), []
        kv_bytes = round(ours.kv_bytes_per_token * (settings.context + (settings.tokens + 1) / 2))
        for precision in chosen:
            row = _speeds(rounds[str(precision)], settings)
            weight_bytes = weight_bytes_per_token(model, precision)
            bandwidth = (weight_bytes + kv_bytes) * row["decode"]
            rows.append(
                PrecisionSpeed(
                    precision=str(precision),
                    **row,
                    weight_bytes=weight_bytes,
                    kv_bytes=kv_bytes,
                    bandwidth=bandwidth,
                    bandwidth_share=bandwidth / read_bandwidth,
                    resident_bytes=grown[str(precision)],
                    file_bytes=_file_bytes(nested, precision),
                    kv_cache_bytes=ours.kv_bytes(settings.context + settings.tokens),
                    switch=switches.get(precision),
                )
            )
        return Bench(
            **about(nested, place, threads),
            path=f"transformers: {why_not}" if why_not else DECODE_PATH,
            kv_type=str(settings.kv or (str(model.dtype).removeprefix("torch.") if why_not else "float16")),
            settings=settings,
            read_bandwidth=read_bandwidth,
            graph_bytes=ours.graph_bytes,
            precisions=rows,
            others=[
                Contender(name, size, **_speeds(rounds[name], settings)) for name, size in others.items()
            ],
            ratios=_ratios(rounds, [str(p) for p in chosen]),
            cut_from=asked if settings != asked else None,
        )


def open_at(
    directory: str, precisions: Named, device: str, hub: Hub, with_llama: bool = False
) -> tuple[Cpu, NestedDirectory, list[Precision | Fit]]:
    """Where it runs, a nested model, and what is named of it, by default all precisions, largest first.

    What is missing shows before anything is measured.
    """
    place = processor(device)
    if with_llama and place.kind == "cuda":
        raise OtaroError("--against llama.cpp is built for this CPU, and compares with --device cpu alone")
    if with_llama:
        library()
    plain = None if any(map(is_fit, precisions or ())) else [Precision(one) for one in precisions or ()]
    nested = NestedDirectory(resolve_nested(directory, max(plain) if plain else None, hub))
    found = {known(nested, one) for one in precisions or [p for p in PRECISIONS if p <= nested.finest]}
    nested.require(max(map(finest_of, found)))
    return place, nested, sorted(found, key=lambda one: bytes_of(nested, one), reverse=True)


def _token_seconds(place: Cpu, engine: Engine, ids: list[int]) -> tuple[float, float]:
    """About how long a token of a prompt takes, and one that is decoded."""
    few = ids[:_TRIED]
    engine.feed(few)  # weights are read in
    engine.keep(0)
    prompt = place.seconds(lambda: engine.feed(few)) / len(few)
    return prompt, place.seconds(lambda: engine.feed(few[:1]))


def _speeds(rounds: Rounds, settings: Settings) -> dict[str, Any]:
    prefill, decode = settings.prompt_tokens / median(rounds.prefill), settings.tokens / median(rounds.decode)
    return {"prefill": prefill, "decode": decode, "rounds": rounds}


def _turn(
    place: Cpu, engine: Engine, ids: list[int], settings: Settings, prepare: Callable[[], object]
) -> tuple[float, float]:
    """Seconds of prefill, and of decode behind the context."""
    prompt, context = settings.prompt_tokens, settings.context
    prepare()
    engine.keep(0)
    prefill = place.seconds(lambda: engine.feed(ids[:prompt]))
    engine.keep(min(context, prompt))
    if context > prompt:
        engine.feed(ids[prompt:context])
    return prefill, place.seconds(lambda: engine.decode(ids[context : context + settings.tokens]))


def switch_times(model: Any, precisions: Sequence[Precision | Fit]) -> dict[Precision | Fit, float]:
    """Median seconds to switch to each precision from the one before it in turn; none if there is but one."""
    times: dict[Precision | Fit, list[float]] = {p: [] for p in precisions}
    if len(times) < 2:
        return {}
    for _ in range(SWITCHES):
        for precision, mine in times.items():
            mine.append(Cpu().seconds(lambda p=precision: set_precision(model, p)))  # type: ignore[misc]
    return {precision: median(mine) for precision, mine in times.items()}


def _ratios(rounds: Mapping[str, Rounds], precisions: Sequence[str]) -> list[Ratio]:
    pairs = [(p, _llama(KINDS[p])) for p in precisions if p in KINDS]
    ratios = []
    for precision, other in [*pairs, *((p, TRANSFORMERS) for p in precisions)]:
        if other in rounds:
            ours, theirs = rounds[precision], rounds[other]
            prefill = median(b / a for a, b in zip(ours.prefill, theirs.prefill, strict=True))
            decode = median(b / a for a, b in zip(ours.decode, theirs.decode, strict=True))
            ratios.append(Ratio(precision, other, prefill, decode))
    return ratios


def _llama(kind: str) -> str:
    return f"llama.cpp {kind}"


def _neighbours(name: str) -> str:
    """A key that sorts a precision beside what it is compared with: the closer in time the better."""
    return {_llama(kind): f"{precision} then {kind}" for precision, kind in KINDS.items()}.get(name, name)


def random_ids(vocabulary: int, count: int) -> list[int]:
    """Tokens, the same ones every time."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _check_positions(config: Any, settings: Settings) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and settings.positions > limit:
        taken = f"--prompt-tokens takes {settings.prompt_tokens}"
        if settings.prompt_tokens <= limit:
            together = settings.context + settings.tokens
            taken = f"--context {settings.context} and --tokens {settings.tokens} take {together}"
        raise OtaroError(f"the model has {limit} positions, but {taken}")


@contextmanager
def threads_for_a_while(wanted: int | None) -> Iterator[int]:
    """Compute on so many threads; by default on as many as torch does."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield wanted or before
    finally:
        torch.set_num_threads(before)


def _file_bytes(nested: NestedDirectory, precision: Precision | Fit) -> int:
    """Of shards; at a fit, of what it reads of them."""
    if isinstance(precision, Fit):
        return bytes_of(nested, precision)
    planes = range(BASE, precision.mantissa_bits + 1)
    return sum((nested.path / shard_name(plane)).stat().st_size for plane in planes)
