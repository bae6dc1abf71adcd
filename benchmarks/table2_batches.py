"""Parts of bench_table2.py with several tokens: every product of a layer, and whole prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu
import table2_products
import torch
from gpu import alternate, capture, enough, medians
from llama3 import PRODUCTS, Product, at, random_packed
from table2_model import PackedModel, half_weights
from table2_products import Settings, check, moved, rotate_half, say

from otaro.kernels import cuda, hopper_halves
from otaro.kernels.packed import Packed
from otaro.runtime.gpu import GpuDecoder
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, Precision

TOKENS = (4, 8, 16, 32, 64, 128)
MULTIPLIED = [Precision(name) for name in ("E5M8", "E5M4", "E5M3")]
TIMES_HALF = {
    "E5M4": {4: 2.3, 8: 2.2, 16: 2.0, 32: 1.6, 64: 1.2},
    "E5M8": {8: 1.3, 16: 1.1},
}
"""How many times as fast as cuBLAS in float16 the products of so many tokens must be, a layer's all together."""
PROMPTS = {500: 1.4, 4000: 1.15}
"""How many times as long as through our own decoder in float16 a prompt of so many tokens may take."""


def layer(asked: Settings) -> dict[str, Any]:
    """Every product of a layer with 4 to 128 tokens as the kernels before it leave them, beside cuBLAS in float16."""
    results: dict[str, Any] = {}
    for product in PRODUCTS:
        if product.name != "head":
            results[product.name] = one_product(product, asked)
            gpu.release()
    total = {
        str(tokens): {name: sum(one[str(tokens)]["seconds"][name] for one in results.values()) for name in contenders()}
        for tokens in TOKENS
    }
    print_layer(results, total)
    return {"products": results, "summed_seconds": total}


def contenders() -> list[str]:
    return ["float16", *map(str, MULTIPLIED)]


def one_product(product: Product, asked: Settings) -> dict[str, Any]:
    """Seconds by tokens and contender, after checks on numbers of their own."""
    copies = table2_products.ROTATED // moved(product, PRECISIONS[-1]) + 1
    rotated = [[random_packed(rows, product.length, gpu.DEVICE) for rows in product.rows] for _ in range(copies)]
    shape = (sum(product.rows), product.length)
    size = moved(product, None)
    matrices = [
        torch.empty(shape, dtype=torch.float16, device=gpu.DEVICE).normal_(std=0.02)
        for _ in range(table2_products.ROTATED // size + 1)
    ]
    results = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, product.length, device=gpu.DEVICE, dtype=torch.float16)
        kind = torch.float32 if tokens <= cuda.MOST_TOKENS else torch.float16  # that of cuBLAS's results
        outs = [torch.empty(tokens, rows, device=gpu.DEVICE, dtype=kind) for rows in product.rows]
        digits, scratch = cuda.to_digits(x, GROUP_SIZE), cuda.Scratch(torch.device(gpu.DEVICE))
        about = size / 4e12 + 2e-6
        graphs = {"float16": capture(partial(rotate_half, x, matrices), enough(about, len(matrices)))}
        checks = {}
        for precision in MULTIPLIED:
            seen = [[at(packed, precision) for packed in one] for one in rotated]
            arranged = product.name != "o" and hopper_halves.serves(seen[0])  # attention is the library's
            given = hopper_halves.arranged(x, hopper_halves.columns_of(tokens)) if arranged else x
            launch = partial(multiply, seen, digits, given, outs, scratch, arranged)
            graphs[str(precision)] = capture(launch, enough(about / 2, copies))
            checks[str(precision)] = outcome = check(rotated[0], precision, tokens)
            if outcome["wrong"]:
                say(f"WRONG: {product.name}, {tokens} tokens at {precision}: {outcome}")
        results[str(tokens)] = {"seconds": medians(alternate(graphs, asked.rounds)), "checks": checks}
    return results


def multiply(
    rotated: list[list[Packed]],
    digits: Any,
    x: torch.Tensor,
    outs: list[torch.Tensor],
    scratch: cuda.Scratch,
    arranged: bool,
    number: int,
) -> None:
    """One copy of the matrices times tokens that are integers already, or float16."""
    matrices = rotated[number % len(rotated)]
    if len(outs[0]) <= cuda.MOST_TOKENS:
        cuda.products(digits, len(outs[0]), matrices, outs, scratch=scratch)
    else:
        cuda.multiply_halves(x, matrices, outs, scratch=scratch, early=True, arranged=arranged)


def print_layer(results: dict[str, Any], total: dict[str, dict[str, float]]) -> None:
    """Microseconds by tokens, and times float16."""
    tables = {name: {tokens: one["seconds"] for tokens, one in result.items()} for name, result in results.items()}
    for title, by_tokens in (tables | {"a layer": total}).items():
        say(f"\n{title}, us by tokens (times float16)")
        say(f"{'':10}" + "".join(f"{tokens:>16}" for tokens in by_tokens))
        for name in contenders():
            cells = (f"{one[name] * 1e6:9.2f} {one['float16'] / one[name]:5.2f}x" for one in by_tokens.values())
            say(f"{name:10}" + "".join(f"{cell:>16}" for cell in cells))


def judged_layer(total: dict[str, dict[str, float]]) -> Iterator[tuple[str, float, float, bool]]:
    """What was asked of products: in words, found, asked, whether that is the least."""
    for precision, by_tokens in TIMES_HALF.items():
        for tokens, factor in by_tokens.items():
            one, what = total[str(tokens)], f"a layer's products of {tokens} tokens at {precision}, times float16"
            yield what, one["float16"] / one[precision], factor, True
    slower = max(one["E5M3"] / one["E5M4"] for one in total.values())
    yield "time of E5M3 beside E5M4 with several tokens", slower, 1.0, False


def judged_prompts(seconds: dict[str, dict[str, float]]) -> Iterator[tuple[str, float, float, bool]]:
    """The same of prompts."""
    for tokens, factor in PROMPTS.items():
        one = seconds[str(tokens)]
        for precision in map(str, MULTIPLIED):
            what = f"reading {tokens} tokens at {precision}, time beside float16 of our own"
            yield what, one[precision] / one["float16"], factor, False


def prompts(asked: Settings) -> dict[str, Any]:
    """Prompts through our decoder: in float16 and at E5M8, E5M4, E5M3."""
    model = PackedModel()
    for _ in range(len(PRECISIONS) - 1):
        model.add_plane()
    packed, half = GpuDecoder(model.weights), GpuDecoder(half_weights())
    results: dict[str, dict[str, float]] = {}
    for tokens in PROMPTS:
        ids = torch.randint(packed.vocabulary, (tokens,)).tolist()
        readers: dict[str, Callable[[], torch.Tensor]] = {"float16": partial(read, half, ids)}
        for precision in MULTIPLIED:
            readers[str(precision)] = partial(read_at, packed, ids, model, precision)
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
    for name in contenders():
        cells = (f"{int(t) / one[name]:9.0f} {one[name] / one['float16']:5.2f}" for t, one in results.items())
        say(f"{name:10}" + "".join(f"{cell:>18}" for cell in cells))
    return {"seconds": results}


def read(decoder: GpuDecoder, ids: list[int]) -> torch.Tensor:
    """From the beginning."""
    return decoder.forward(ids, decoder.new_cache(capacity=len(ids)))


def read_at(decoder: GpuDecoder, ids: list[int], model: PackedModel, precision: Precision) -> torch.Tensor:
    model.switch(precision)
    return read(decoder, ids)
