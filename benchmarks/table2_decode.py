"""Parts of bench_table2.py that decode LLaMA-3-8B with random weights, token after token, behind a context of 2,000.

Through transformers as its users run it fast; through our own decoder at every precision; and switches between tokens. A token
of ours is one launch of a captured graph, which also chooses the next one and leaves it where the following step reads it, so
the host only launches. A round decodes 48 tokens; keys and values of the context are random numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import gpu
import llama3
import torch
from gpu import say
from llama3 import ALL_PLANES, GIB, NORM_BYTES, PackedModel, cache_bytes, fill, half_weights
from table2_products import MULTIPLIED, Settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, StaticCache

from otaro.errors import OtaroError
from otaro.kernels import nvrtc
from otaro.runtime.caches import GpuCache
from otaro.runtime.gpu import GpuDecoder
from otaro.sefp.precision import PRECISIONS, Precision

CONTEXT = 2000
CAPACITY = 2048
STEPS = CAPACITY - CONTEXT  # of a round; then the context is gone back to
PAPER = {"float16": (15.20, 39.00), "E5M4": (4.77, 95.65)}
"""Table 2: GB of weights and keys and values, tokens a second."""
CACHES = {"float16": None, "E5M4": Precision("E5M4")}
HALF = "float16"
FIRST = 1  # the token that every round begins with
PAIRS = (("E5M8", "E5M4"), ("E5M4", "E5M3"), ("E5M8", "E5M3"))
CALLS = 1000  # of set_precision
PROMPTS = (500, 4000)  # tokens


class Contender(NamedTuple):
    """Something that decodes."""

    step: Callable[[], Any]
    """One token after those before; it may return before the GPU is done."""
    rewind: Callable[[], Any]
    """Forget all tokens after the context."""


def rounds_of(contenders: Mapping[str, Contender], rounds: int, steps: int | None = None) -> dict[str, list[float]]:
    """Seconds of a token of each contender, in every round; contenders take turns, and the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    steps = steps or STEPS
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            contender.rewind()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                contender.step()
            torch.cuda.synchronize()
            if number:
                times[name].append((time.perf_counter() - started) / steps)
    return times


def through_transformers(asked: Settings) -> dict[str, Any]:
    """Float16 as transformers' users run it fast: static cache, the forward of one token compiled with CUDA graphs."""
    say("\nfloat16 through transformers, compiled (mode reduce-overhead) with a static cache; compiling takes a minute")
    before = held()
    contender, weights = transformers_contender()
    started = time.perf_counter()
    for _ in range(3):  # compiles, then records the graph
        contender.step()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - started
    times = rounds_of({"transformers": contender}, 3 if asked.quick else 5)["transformers"]
    seconds = statistics.median(times)
    bound = roofline(None, None, asked.copy_rate)
    say(f"compiled in {compiled:.0f} s")
    say(f"{1 / seconds:.1f} tokens/s, {seconds * 1e3:.3f} ms; by the bytes no faster than {1 / bound:.0f} tokens/s")
    return {
        "seconds": seconds, "rounds": times, "tokens_per_s": 1 / seconds, "compile_seconds": compiled,
        "accounted": accounted(None, None), "weights_allocated": weights - before,
        "allocated": held() - before,
    }  # fmt: skip


@torch.no_grad()
def transformers_contender() -> tuple[Contender, int]:
    """The compiled model after a prompt; and the bytes allocated when it held its weights alone."""
    with torch.device(gpu.DEVICE):
        model = AutoModelForCausalLM.from_config(llama3.SHAPE, dtype=torch.float16).eval()
    weights = held()
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    prompt = torch.randint(llama3.SHAPE.vocab_size, (1, CONTEXT), device=gpu.DEVICE)
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def forward(ids: torch.Tensor) -> Any:
        following = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return following[:, -1].argmax(-1, keepdim=True)

    compiled: Any = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    def step() -> None:
        token.copy_(compiled(token))

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)

    return Contender(step, rewind), weights


def roofline(precision: Precision | None, cache: Precision | None, copy_rate: float) -> float:
    """Seconds that a token takes at least: what it must read, at the speed of a plain copy."""
    return llama3.step_bytes(CONTEXT, precision, cache) / copy_rate


def accounted(precision: Precision | None, cache: Precision | None) -> dict[str, float]:
    """Memory by exact accounting, in GiB."""
    weights, keys = llama3.weight_bytes(precision) / GIB, cache_bytes(CONTEXT, cache) / GIB
    return {"weights_gib": weights, "cache_gib": keys, "norms_gib": NORM_BYTES / GIB, "total_gib": weights + keys}


# Our own decoder --------------------------------------------------------------------------------------------


def row_name(precision: Precision, cache: str) -> str:
    return f"{precision}, {cache} cache"


def decode(asked: Settings) -> dict[str, Any]:
    """Float16 and every precision, with keys and values in float16 and at E5M4."""
    say(f"\nour decoder behind {CONTEXT} tokens; weights are made plane by plane, and memory is read in between")
    model, weights_held = growing_model()
    before = held()
    decoder = GpuDecoder(model.weights)
    caches = {name: filled(decoder, kv) for name, kv in CACHES.items()}
    contenders: dict[str, Contender] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, cache in caches.items():
        for precision in PRECISIONS:
            title = row_name(precision, name)
            contenders[title] = contender(decoder, cache, partial(model.switch, precision))
            rows[title] = about(precision, cache, weights_held[precision])
    rounds_of(contenders, 1, steps=2)  # everything is compiled, captured and allocated then
    working = held() - before - sum(cache.nbytes for cache in caches.values())
    before = held()
    weights = half_weights()
    half_held = held() - before
    half = GpuDecoder(weights)
    half_cache = filled(half, None)
    contenders = {HALF: contender(half, half_cache, lambda: None), **contenders}
    rows = {HALF: about(None, half_cache, half_held), **rows}
    times = rounds_of(contenders, asked.rounds)
    for name, row in rows.items():
        seconds = statistics.median(times[name])
        at, kv = (None if row[key] == HALF else Precision(row[key]) for key in ("precision", "cache"))
        row |= {"seconds": seconds, "rounds": times[name], "tokens_per_s": 1 / seconds}
        row["roofline_tokens_per_s"] = 1 / roofline(at, kv, asked.copy_rate)
        row["wrong"] = not finite(*((half, half_cache) if name == HALF else (decoder, caches[row["cache"]])), contenders[name])
    launches = {HALF: launches_of(half, None)}
    for name, kv in CACHES.items():
        model.switch(Precision("E5M4"))
        launches[row_name(Precision("E5M4"), name)] = launches_of(decoder, kv)
    result = {"rows": rows, "launches": launches, "working_bytes": working}
    result["graph_bytes"] = {"packed": decoder.graph_bytes, HALF: half.graph_bytes}
    print_rows(rows)
    for name, count in launches.items():
        say(f"{name}: {count['kernels']} launches of our kernels and {count['library']} of torch's in a token")
    say(f"besides weights and caches: {working / 1e6:.1f} MB to work with, {decoder.graph_bytes / 1e6:.1f} MB of graphs")
    return result


def growing_model() -> tuple[PackedModel, dict[Precision, int]]:
    """The model with all planes, and the bytes that were allocated when it had those of each precision."""
    before = held()
    model = PackedModel()
    sizes = {PRECISIONS[-1]: held() - before}
    for precision in PRECISIONS[-2::-1]:
        model.add_plane()
        sizes[precision] = held() - before
    return model, sizes


def held() -> int:
    """Bytes that torch has allocated on the GPU."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def filled(decoder: GpuDecoder, kv: Precision | None) -> GpuCache:
    cache = decoder.new_cache(kv, capacity=CAPACITY)
    fill(cache, CONTEXT)
    return cache


def contender(decoder: GpuDecoder, cache: GpuCache, prepare: Callable[[], None]) -> Contender:
    """One precision of a decoder, going on by the likeliest token."""

    def rewind() -> None:
        prepare()
        cache.crop(CONTEXT)
        decoder.begin([FIRST], cache)

    return Contender(decoder.advance, rewind)


def about(precision: Precision | None, cache: GpuCache, weights: int) -> dict[str, Any]:
    """What is known of a contender before it runs."""
    return {
        "precision": str(precision or HALF), "cache": str(cache.precision or HALF),
        "accounted": accounted(precision, cache.precision), "weights_allocated": weights, "cache_allocated": cache.nbytes,
        "allocated_gib": (weights + cache.nbytes) / GIB,
    }  # fmt: skip


def finite(decoder: GpuDecoder, cache: GpuCache, one: Contender) -> bool:
    """Whether the logits of a step are numbers, and not all the same."""
    one.rewind()
    try:
        logits = decoder.forward([FIRST], cache)
    except OtaroError:  # the cache met what is no number
        return False
    return bool(logits.isfinite().all()) and float(logits.std()) > 0


def launches_of(decoder: GpuDecoder, kv: Precision | None) -> dict[str, int]:
    """Launches of a token. A new cache has no graph yet, so that they can be counted one by one."""
    cache = decoder.new_cache(kv, capacity=1)
    decoder.begin([FIRST], cache)
    with counted() as count:
        decoder.advance()
    return count


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts launches of our own kernels, and torch's operations that are more than another view of a tensor."""
    count = {"kernels": 0, "library": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and not str(func).startswith("aten.empty"):
                count["library"] += 1
            return func(*args, **(kwargs or {}))

    launch = nvrtc.Launch.on

    def counting(self: nvrtc.Launch, handle: int) -> None:
        count["kernels"] += 1
        launch(self, handle)

    launches: Any = nvrtc.Launch
    launches.on = counting
    try:
        with Count():  # type: ignore[no-untyped-call]
            yield count
    finally:
        launches.on = launch


def print_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    half = rows[HALF]["seconds"]
    say(
        f"{'':22}{'ms':>8}{'tokens/s':>10}{'x own f16':>11}{'of bound':>10}"
        f"{'weights':>10}{'cache':>8}{'GiB':>8}{'allocated':>11}"
    )
    for name, row in rows.items():
        memory, share = row["accounted"], row["tokens_per_s"] / row["roofline_tokens_per_s"]
        say(
            f"{name:22}{row['seconds'] * 1e3:8.3f}{row['tokens_per_s']:10.1f}{half / row['seconds']:11.2f}{share:10.0%}"
            f"{memory['weights_gib']:10.3f}{memory['cache_gib']:8.3f}{memory['total_gib']:8.3f}{row['allocated_gib']:11.3f}"
        )


def print_summary(results: Mapping[str, Any]) -> None:
    """Table 2: the paper's rows beside ours, and transformers' where it ran."""
    rows, theirs = results.get("decode", {}).get("rows"), results.get("transformers", {}).get("tokens_per_s")
    if not rows:
        return
    say("\nTable 2: LLaMA-3-8B with 2,000 tokens of context (the paper's figures are from its own GPU)")
    say(f"{'':28}{'memory':>10}{'tokens/s':>10}{'x float16':>11}")
    for name, (memory, speed) in PAPER.items():
        say(f"{'the paper, ' + name:28}{memory:7.2f} GB{speed:10.2f}{speed / PAPER[HALF][1]:11.2f}")
    if theirs:
        total = results["transformers"]["accounted"]["total_gib"]
        say(f"{'transformers, compiled':28}{total:6.2f} GiB{theirs:10.1f}{1:11.2f}")
    base = theirs or rows[HALF]["tokens_per_s"]
    for name, row in rows.items():
        speed = row["tokens_per_s"]
        say(f"{'ours, ' + name:28}{row['accounted']['total_gib']:6.2f} GiB{speed:10.1f}{speed / base:11.2f}")
    say(f"x float16: times {'transformers, compiled' if theirs else 'float16 of our own'}; of the paper's rows, times its own")


def switch(asked: Settings) -> dict[str, Any]:
    """What it costs to go to another precision between two tokens.

    Tokens at two precisions in turn, beside tokens at either alone: with the host ahead of the GPU, and with the host waiting
    for every token, when nothing hides what it does. The host sets every module, as `otaro.set_precision` does.
    """
    say("\nswitching between two tokens")
    model = PackedModel(ALL_PLANES)
    decoder = GpuDecoder(model.weights)
    cache = filled(decoder, None)
    pairs: dict[str, Any] = {}
    for first, second in PAIRS:
        both = (Precision(first), Precision(second))
        for waiting in (False, True):
            contenders = {str(one): steady(model, decoder, cache, one, waiting) for one in both}
            contenders["in turn"] = in_turn(model, decoder, cache, both, waiting)
            times = rounds_of(contenders, asked.rounds)
            costs = [c - (a + b) / 2 for a, b, c in zip(*times.values(), strict=True)]
            name = f"{first} and {second}" + (", waiting" if waiting else "")
            pairs[name] = {"seconds": statistics.median(costs), "rounds": costs, "waiting": waiting}
            say(f"{name:24}{pairs[name]['seconds'] * 1e6:8.1f} us a switch")
    calls = []
    for _, precision in zip(range(CALLS), cycle(PRECISIONS), strict=False):
        started = time.perf_counter()
        model.switch(precision)
        calls.append(time.perf_counter() - started)
    alone = statistics.median(calls)
    say(f"{'set_precision by itself':24}{alone * 1e6:8.1f} us, {len(model.weights.modules)} modules")
    return {"pairs": pairs, "set_precision_seconds": alone, "modules": len(model.weights.modules)}


def steady(model: PackedModel, decoder: GpuDecoder, cache: GpuCache, precision: Precision, waiting: bool) -> Contender:
    one = contender(decoder, cache, partial(model.switch, precision))
    return Contender(lambda: decoder.chosen(decoder.advance()), one.rewind) if waiting else one


def in_turn(
    model: PackedModel, decoder: GpuDecoder, cache: GpuCache, both: tuple[Precision, Precision], waiting: bool
) -> Contender:
    """Another precision at every token."""
    coming = cycle(both)

    def step() -> None:
        model.switch(next(coming))
        number = decoder.advance()
        if waiting:
            decoder.chosen(number)

    return Contender(step, contender(decoder, cache, lambda: None).rewind)


# Prompts ----------------------------------------------------------------------------------------------------


def prompts(asked: Settings) -> dict[str, Any]:
    """Prompts through our decoder: in float16 and at E5M8, E5M4, E5M3."""
    model = PackedModel(ALL_PLANES)
    packed, half = GpuDecoder(model.weights), GpuDecoder(half_weights())
    results: dict[str, dict[str, float]] = {}
    for tokens in PROMPTS:
        ids = torch.randint(packed.vocabulary, (tokens,)).tolist()
        readers: dict[str, Callable[[], object]] = {HALF: partial(read, half, ids)}
        for precision in MULTIPLIED:
            readers[str(precision)] = partial(read, packed, ids, partial(model.switch, precision))
        seconds: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(asked.rounds + 1):
            for name, reader in readers.items():
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                before.record()
                reader()
                after.record()
                torch.cuda.synchronize()
                if number:  # the first round compiles and allocates
                    seconds[name].append(before.elapsed_time(after) * 1e-3)
        results[str(tokens)] = {name: statistics.median(times) for name, times in seconds.items()}
    say("\nreading a prompt, tokens a second (time beside float16 of our own)")
    for name in readers:
        cells = (f"{int(t) / one[name]:9.0f} {one[name] / one[HALF]:5.2f}" for t, one in results.items())
        say(f"{name:10}" + "".join(f"{cell:>18}" for cell in cells))
    return {"seconds": results}


def read(decoder: GpuDecoder, ids: list[int], prepare: Callable[[], object] = lambda: None) -> None:
    prepare()
    decoder.forward(ids, decoder.new_cache(capacity=len(ids)))
