"""Parts of bench_table2.py that decode LLaMA-3-8B with random weights behind a context of 2,000 tokens.

Through transformers as its users run it fast, and through our own decoder at every precision. A token of ours
is one launch of a captured graph, which also chooses the next one and leaves it where the following step
reads it, so the host only launches. A round decodes 48 tokens; keys and values of the context are random
numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import gpu
import llama3
import torch
from gpu import say
from llama3 import GIB, add_plane, fill, half_model, model_of, packed_model, random_packed
from table2_products import MULTIPLIED
from transformers import AutoModelForCausalLM, StaticCache

from otaro import load, pack
from otaro.errors import OtaroError
from otaro.kernels.packed import Packed
from otaro.runtime.caches import GpuCache
from otaro.runtime.description import Description, Matrix
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.report import Generation
from otaro.runtime.rows import Batch
from otaro.sefp.precision import PRECISIONS, Precision

CONTEXT = 2000
CAPACITY = 2048
STEPS = CAPACITY - CONTEXT  # of a round; then the context is gone back to
PAPER = {"float16": (15.20, 39.00), "E5M4": (4.77, 95.65)}
"""Table 2: GB of weights and keys and values, tokens a second."""
E5M4 = Precision("E5M4")
CACHES = {"float16": None, "E5M4": E5M4}
HALF = "float16"
FIRST = 1  # the token that every round begins with
PROMPTS = (500, 4000)  # tokens


class Contender(NamedTuple):
    """Something that decodes."""

    step: Callable[[], Any]
    """One token after those before; it may return before the GPU is done."""
    rewind: Callable[[], Any]
    """Forget all tokens after the context."""


def rounds_of(contenders: Mapping[str, Contender], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each contender in every round, by turns of which the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
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


def accounted(precision: Precision | None, cache: Precision | None) -> dict[str, float]:
    """Memory by exact accounting, in GiB."""
    weights, keys = llama3.weight_bytes(precision) / GIB, llama3.cache_bytes(CONTEXT, cache) / GIB
    return {"weights_gib": weights, "cache_gib": keys, "total_gib": weights + keys}


# Through transformers ---------------------------------------------------------------------------------------


def through_transformers(rounds: int) -> dict[str, Any]:
    """Float16 as users of transformers run it fast: static cache, one token's forward in CUDA graphs."""
    how = "compiled (mode reduce-overhead) with a static cache"
    say(f"\nfloat16 through transformers, {how}; compiling takes a minute")
    contender = transformers_contender()
    started = time.perf_counter()
    for _ in range(3):  # compiles, then records the graph
        contender.step()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - started
    times = rounds_of({"transformers": contender}, min(rounds, 5), STEPS)["transformers"]
    seconds = statistics.median(times)
    say(f"compiled in {compiled:.0f} s")
    found = {"seconds": seconds, "rounds": times, "tokens_per_s": 1 / seconds, "compile_seconds": compiled}
    return {**found, "accounted": accounted(None, None)}


@torch.no_grad()
def transformers_contender() -> Contender:
    """The compiled model after a prompt."""
    with torch.device(gpu.DEVICE):
        model = AutoModelForCausalLM.from_config(llama3.SHAPE, dtype=torch.float16).eval()
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)

    @torch.no_grad()
    def forward(ids: torch.Tensor) -> Any:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    token = forward(torch.randint(llama3.SHAPE.vocab_size, (1, CONTEXT), device=gpu.DEVICE))
    compiled: Any = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    def step() -> None:
        token.copy_(compiled(token))

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)

    return Contender(step, rewind)


# Our own decoder --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A contender of ours: a decoder with a cache, at one precision."""

    decoder: GpuDecoder
    cache: GpuCache
    precision: Precision | None
    """None: float16."""
    weights: int
    """Bytes that they took when there were only those of this precision."""

    @property
    def bits(self) -> bytes:
        """Of every matrix; plain ones ignore them."""
        return self.decoder.description.all_at(self.precision or PRECISIONS[0])

    def contender(self) -> Contender:
        """Goes on by the likeliest token."""

        def rewind() -> None:
            self.cache.crop(CONTEXT)
            self.decoder.begin([FIRST], self.cache, [0], [self.bits])

        return Contender(self.decoder.advance, rewind)

    def result(self, times: list[float], copy_rate: float) -> dict[str, Any]:
        """Speed, beside what reading the bytes at the speed of a copy would allow, and memory."""
        seconds, kv = statistics.median(times), self.cache.precision
        bound = llama3.step_bytes(CONTEXT, self.precision, kv) / copy_rate
        return {
            "seconds": seconds, "rounds": times, "tokens_per_s": 1 / seconds, "of_bound": bound / seconds,
            "accounted": accounted(self.precision, kv), "cache_allocated": self.cache.nbytes,
            "allocated_gib": (self.weights + self.cache.nbytes) / GIB, "wrong": not self.finite(),
        }  # fmt: skip

    def finite(self) -> bool:
        """Whether the logits of a step are numbers, and not all the same."""
        self.cache.crop(CONTEXT)
        try:
            logits = self.decoder.forward([FIRST], self.cache, bits=self.bits)
        except OtaroError:  # the cache met what is no number
            return False
        return bool(logits.isfinite().all()) and float(logits.std()) > 0


def row_name(precision: Precision, cache: str) -> str:
    return f"{precision}, {cache} cache"


def decode(rounds: int) -> dict[str, Any]:
    """Float16 and every precision, with keys and values in float16 and at E5M4."""
    made = "weights are made plane by plane, and memory is read in between"
    say(f"\nour decoder behind {CONTEXT} tokens; {made}")
    copy_rate = gpu.copy_rate(rounds)
    say(f"a plain copy moves {copy_rate / 1e12:.2f} TB/s, bytes read and written counted")
    gpu.release()
    weights, sizes = growing_model()
    decoder, before = GpuDecoder(weights), held()
    plain = half_model()
    half_size, half = held() - before, GpuDecoder(plain)
    rows = {HALF: Row(half, filled(half, None), None, half_size)}
    for name, kv in CACHES.items():
        cache = filled(decoder, kv)
        rows |= {row_name(one, name): Row(decoder, cache, one, sizes[one]) for one in PRECISIONS}
    times = rounds_of({name: row.contender() for name, row in rows.items()}, rounds, STEPS)
    found = {name: row.result(times[name], copy_rate) for name, row in rows.items()}
    say(f"graphs take {decoder.graph_bytes / 1e6:.1f} MB")
    return {"rows": found, "copy_bytes_per_s": copy_rate, "graph_bytes": decoder.graph_bytes}


def growing_model() -> tuple[Description, dict[Precision, int]]:
    """The model with all planes, and the bytes that were allocated when it had those of each precision."""
    made: list[Packed] = []

    def matrix(rows: int, length: int) -> Matrix:
        made.append(random_packed(rows, length, planes=0))
        return Matrix(made[-1])

    before = held()
    model = model_of(matrix)
    sizes = {PRECISIONS[-1]: held() - before}
    for precision in PRECISIONS[-2::-1]:
        for packed in made:
            add_plane(packed)
        sizes[precision] = held() - before
    return model, sizes


def held() -> int:
    """Bytes that torch has allocated on the GPU."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def filled(decoder: GpuDecoder, kv: Precision | None) -> GpuCache:
    cache = decoder.new_cache(kv, capacity=CAPACITY)
    fill(cache, CONTEXT)
    return cache


def print_table(results: Mapping[str, Any]) -> None:
    """Table 2: the paper's rows beside ours, and transformers' where it ran."""
    rows, theirs = results.get("decode", {}).get("rows"), results.get("transformers", {}).get("tokens_per_s")
    if not rows:
        return
    say("\nTable 2: LLaMA-3-8B with 2,000 tokens of context (the paper's figures are from its own GPU)")
    head = ("memory", "allocated", "tokens/s", "x float16", "x own f16", "of bound")
    say(" " * 28 + "{:>10}{:>11}{:>10}{:>11}{:>11}{:>10}".format(*head))
    for name, (memory, speed) in PAPER.items():
        say(f"{'the paper, ' + name:28}{memory:7.2f} GB{'':11}{speed:10.2f}{speed / PAPER[HALF][1]:11.2f}")
    if theirs:
        total = results["transformers"]["accounted"]["total_gib"]
        say(f"{'transformers, compiled':28}{total:6.2f} GiB{'':11}{theirs:10.1f}{1:11.2f}")
    own = rows[HALF]["tokens_per_s"]
    for name, row in rows.items():
        speed, total = row["tokens_per_s"], row["accounted"]["total_gib"]
        times = f"{speed / theirs:11.2f}" if theirs else f"{'':11}"
        sizes = f"{total:6.2f} GiB{row['allocated_gib']:11.3f}"
        say(f"{'ours, ' + name:28}{sizes}{speed:10.1f}{times}{speed / own:11.2f}{row['of_bound']:10.0%}")
    bound = "of bound: of the bytes at the speed of a copy"
    say(f"x float16: times transformers compiled, of the paper's rows its own; {bound}")


# Prompts ----------------------------------------------------------------------------------------------------


def prompts(rounds: int) -> dict[str, Any]:
    """Prompts through our decoder: in float16 and at E5M8, E5M4, E5M3."""
    packed, half = GpuDecoder(packed_model()), GpuDecoder(half_model())
    results: dict[str, dict[str, float]] = {}
    for tokens in PROMPTS:
        ids = torch.randint(packed.vocabulary, (tokens,)).tolist()
        readers = {HALF: partial(read, half, ids, PRECISIONS[0])}
        readers |= {str(precision): partial(read, packed, ids, precision) for precision in MULTIPLIED}
        contenders = {name: Contender(reader, lambda: None) for name, reader in readers.items()}
        times = rounds_of(contenders, rounds, steps=1)
        results[str(tokens)] = {name: statistics.median(seconds) for name, seconds in times.items()}
    say("\nreading a prompt, tokens a second (time beside float16 of our own)")
    for name in readers:
        cells = (f"{int(t) / one[name]:9.0f} {one[name] / one[HALF]:5.2f}" for t, one in results.items())
        say(f"{name:10}" + "".join(f"{cell:>18}" for cell in cells))
    return {"seconds": results}


def read(decoder: GpuDecoder, ids: list[int], precision: Precision) -> None:
    decoder.forward(ids, decoder.new_cache(capacity=len(ids)), bits=decoder.description.all_at(precision))


# Through `generate` -----------------------------------------------------------------------------------------


class _Listener:
    """A streamer that looks at every token."""

    def put(self, tokens: torch.Tensor) -> None:
        tokens.tolist()

    def end(self) -> None:
        pass


def api(rounds: int) -> dict[str, Any]:
    """E5M4 by `generate`, with a streamer and without, beside the decoder that it calls.

    Which model it is called on makes no difference to what it adds to a token: the built-in one has it, with
    the decoder of LLaMA-3-8B's shapes beneath.
    """
    decoder, report = GpuDecoder(packed_model()), Generation()
    bits, cache = decoder.description.all_at(E5M4), filled(decoder, None)
    with TemporaryDirectory() as folder:
        pack("builtin", Path(folder) / "model")
        model = load(Path(folder) / "model", E5M4, device=gpu.DEVICE)
        ids = torch.full((1, CONTEXT + 1), FIRST, device=gpu.DEVICE)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": STEPS - 1}

        def generate(streamer: Any) -> None:
            cache.crop(CONTEXT)
            model.generate(ids, past_key_values=cache, streamer=streamer, report=report, **options)

        contender = Row(decoder, cache, E5M4, 0).contender()
        times: dict[str, list[float]] = {"decoder": [], "generate": [], "generate, streamed": []}
        with (
            patch("otaro.runtime.rows.decoder_of", lambda model: decoder),
            patch.object(Batch, "bits", lambda batch, some, later=0: [bits] * len(some)),
        ):
            for number in range(rounds + 2):  # graphs are captured the second time
                found = {"decoder": rounds_of({"decoder": contender}, 1, STEPS - 2)["decoder"][0]}
                for name, streamer in (("generate", None), ("generate, streamed", _Listener())):
                    generate(streamer)
                    found[name] = 1 / report.decode_rate
                for name, seconds in found.items() if number > 1 else ():
                    times[name].append(seconds)
    speeds = {name: 1 / statistics.median(seconds) for name, seconds in times.items()}
    say(f"\nE5M4 behind {CONTEXT} tokens, tokens a second")
    for name, speed in speeds.items():
        say(f"{name:20}{speed:8.1f}{speed / speeds['decoder']:8.1%}")
    return {"tokens_per_s": speeds}
