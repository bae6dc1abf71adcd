"""Parts of bench_table2.py that need no model: products of one token, of many, and the quantizing of a tuning step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu
import torch
from gpu import alternate, capture, copies, rotating, say
from llama3 import PRODUCTS, Product, at, matrix_bytes, random_packed
from torch.nn.functional import linear

from otaro.kernels import cuda, halves, hopper_halves, reference
from otaro.kernels.packed import Packed
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, Precision
from otaro.tune import fake_quant

CHECKED = 48  # rows
TOLERANCE = 1e-3  # relative error of a product; integers of 16 bits are good for 1e-4
BATCH_SHAPE = (28672, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LAYER_TOKENS = (4, 8, 16, 32, 64, 128)
MULTIPLIED = [Precision(name) for name in ("E5M8", "E5M4", "E5M3")]


class Settings(NamedTuple):
    """What all parts are told."""

    rounds: int
    copy_rate: float
    """Bytes a second of a plain copy."""
    quick: bool = False


def packed_copies(product: Product) -> list[list[Packed]]:
    size = moved(product, PRECISIONS[-1])
    return copies(size, lambda: [random_packed(rows, product.length) for rows in product.rows])


def half_copies(product: Product) -> list[torch.Tensor]:
    """All matrices of the product in one."""
    return copies(moved(product, None), lambda: gpu.halves(sum(product.rows), product.length))


def lowered(rotated: list[list[Packed]], precision: Precision) -> list[list[Packed]]:
    return [[at(packed, precision) for packed in one] for one in rotated]


def multiply_half(matrix: torch.Tensor, x: torch.Tensor) -> None:
    """In float16 throughout, by cuBLAS."""
    linear(x, matrix)


def half_seconds(size: int) -> float:
    """About what a product in float16 takes that moves so many bytes."""
    return size / 4e12 + 2e-6


def moved(product: Product, precision: Precision | None) -> int:
    """Bytes that a product reads and writes: weights, activations in float16 or as integers, results."""
    rows = sum(product.rows)
    weights = sum(matrix_bytes(one, product.length, precision) for one in product.rows)
    if precision is None:
        return weights + 2 * (product.length + rows)
    return weights + 2 * product.length + product.length // 8 + 4 * rows


# One token --------------------------------------------------------------------------------------------------


def gemv(asked: Settings) -> dict[str, Any]:
    """Every product of the model with one token, at every precision, beside cuBLAS in float16."""
    results = {}
    for product in PRODUCTS:
        results[product.name] = of_one_token(product, asked)
        gpu.release()
        print_product(product.name, results[product.name], asked.copy_rate)
    names = results["head"]["seconds"]
    total = {name: sum(p.count * results[p.name]["seconds"][name] for p in PRODUCTS) for name in names}
    print_sums(total)
    return {"products": results, "summed_seconds": total}


def of_one_token(product: Product, asked: Settings) -> dict[str, Any]:
    """Seconds of each contender on copies of the matrices, after a check on numbers of their own."""
    rotated = packed_copies(product)
    checks = {str(p): check(rotated[0], p) for p in PRECISIONS}
    tell_wrong(product.name, checks)
    outs = [torch.empty(1, rows, device=gpu.DEVICE) for rows in product.rows]
    x = torch.randn(1, product.length, device=gpu.DEVICE, dtype=torch.float16)
    about = half_seconds(moved(product, None))
    contenders = {"float16": rotating(half_copies(product), about, multiply_half, x)}
    for precision in PRECISIONS:
        matrices, about = lowered(rotated, precision), moved(product, precision) / 3e12 + 2e-6
        digits = cuda.to_digits(x, GROUP_SIZE)
        contenders[str(precision)] = rotating(matrices, about, multiply_one, digits, outs)
        contenders[f"{precision} + quantize"] = rotating(matrices, about, quantize_multiply, x, digits, outs)
    contenders["float16 again"] = contenders["float16"]  # how far the same thing is from itself
    moves = {"float16": moved(product, None), **{str(precision): moved(product, precision) for precision in PRECISIONS}}
    sizes = {"shape": [sum(product.rows), product.length], "copies": len(rotated), "bytes": moves}
    return {**sizes, "seconds": alternate(contenders, asked.rounds), "checks": checks}


def multiply_one(matrices: list[Packed], digits: Any, outs: list[torch.Tensor]) -> None:
    """One token that is integers already."""
    cuda.products(digits, 1, matrices, outs)


def quantize_multiply(matrices: list[Packed], x: torch.Tensor, digits: Any, outs: list[torch.Tensor]) -> None:
    """The same with a launch before it that makes integers."""
    cuda.to_digits(x, GROUP_SIZE, digits)
    cuda.products(digits, 1, matrices, outs)


def print_product(name: str, result: dict[str, Any], copy_rate: float) -> None:
    rows, length = result["shape"]
    seconds, half = result["seconds"], result["seconds"]["float16"]
    say(f"\n{name}: {rows} x {length}, one token, {result['copies']} copies in turn")
    head = f"{'':10}{'MB':>9}{'us':>9}{'TB/s':>7}{'of copy':>9}{'speed-up':>10}"
    say(head + f"{'with quantize, us':>19}{'speed-up':>10}{'error':>9}")
    for row, size in result["bytes"].items():
        rate, times = size / seconds[row], half / seconds[row]
        line = f"{row:10}{size / 1e6:9.1f}{seconds[row] * 1e6:9.2f}{rate / 1e12:7.2f}{rate / copy_rate:9.0%}{times:9.2f}x"
        if (quantized := seconds.get(f"{row} + quantize")) is not None:
            line += f"{quantized * 1e6:19.2f}{half / quantized:9.2f}x{result['checks'][row]['error']:9.1e}"
        say(line)
    say(f"float16 once more: {seconds['float16 again'] * 1e6:.2f} us")


def print_sums(total: dict[str, float]) -> None:
    base = total["float16"]
    say("\nall products of one token (32 layers and the head)")
    say(f"{'':10}{'ms':>9}{'speed-up':>10}{'with quantize, ms':>19}{'speed-up':>10}")
    for name in ("float16", *map(str, PRECISIONS)):
        line = f"{name:10}{total[name] * 1e3:9.3f}{base / total[name]:9.2f}x"
        if (quantized := total.get(f"{name} + quantize")) is not None:
            line += f"{quantized * 1e3:19.3f}{base / quantized:9.2f}x"
        say(line)


# Checks -----------------------------------------------------------------------------------------------------


def check(matrices: list[Packed], precision: Precision, tokens: int = 1) -> dict[str, Any]:
    """Some rows against the reference, integers bit for bit, and against the decoded weights in float64; every row must be
    written.
    """
    seen = [at(packed, precision) for packed in matrices]
    x = torch.randn(tokens, seen[0].length, device=gpu.DEVICE).half().float()
    outs = [torch.full((tokens, len(packed.base)), torch.nan, device=gpu.DEVICE) for packed in seen]
    integers = tokens <= cuda.MOST_TOKENS
    if integers:
        cuda.products(cuda.to_digits(x, GROUP_SIZE), tokens, seen, outs)
    else:
        cuda.multiply_halves(x.half(), seen, outs)
    same, unwritten, off, size = True, 0, 0.0, 0.0
    for packed, out in zip(seen, outs, strict=True):
        rows = len(packed.base)
        some = torch.cat([torch.tensor([0, rows - 1]), torch.randint(rows, (CHECKED,))]).to(gpu.DEVICE)
        few = on_cpu(packed.rows(some))
        found = out[:, some].cpu()
        same &= not integers or torch.equal(found, reference.linear(x.cpu(), few))
        exact = x.cpu().double() @ reference.decode(few).double().T
        off, size = off + float((found - exact).square().sum()), size + float(exact.square().sum())
        unwritten += int(out.isnan().sum())
    error = (off / size) ** 0.5
    right = same and error < TOLERANCE and not unwritten
    return {"error": error, "same_bits": same, "unwritten": unwritten, "wrong": not right}


def on_cpu(packed: Packed) -> Packed:
    base, scales, *planes = (part.cpu() for part in (packed.base, packed.scales, *packed.planes))
    return packed._replace(base=base, scales=scales, planes=planes)


def tell_wrong(what: str, checks: dict[str, dict[str, Any]]) -> None:
    for name, outcome in checks.items():
        if outcome["wrong"]:
            say(f"WRONG: {what} at {name}: {outcome}")


# Several tokens ---------------------------------------------------------------------------------------------


def layer(asked: Settings) -> dict[str, Any]:
    """Every product of a layer with 4 to 128 tokens as the kernels before it leave them, beside cuBLAS in float16."""
    results: dict[str, Any] = {}
    for product in PRODUCTS[:-1]:  # without the head
        results[product.name] = of_many_tokens(product, asked)
        gpu.release()
    tables = {name: {tokens: one["seconds"] for tokens, one in result.items()} for name, result in results.items()}
    names = ("float16", *map(str, MULTIPLIED))
    total = {
        str(tokens): {name: sum(table[str(tokens)][name] for table in tables.values()) for name in names}
        for tokens in LAYER_TOKENS
    }
    for title, by_tokens in (tables | {"a layer": total}).items():
        print_speedups(f"{title}, us by tokens (times float16)", by_tokens)
    return {"products": results, "summed_seconds": total}


def of_many_tokens(product: Product, asked: Settings) -> dict[str, Any]:
    """Seconds by tokens and contender, after checks on numbers of their own."""
    rotated, matrices = packed_copies(product), half_copies(product)
    about, results = half_seconds(moved(product, None)), {}
    for tokens in LAYER_TOKENS:
        x = torch.randn(tokens, product.length, device=gpu.DEVICE, dtype=torch.float16)
        kind = torch.float32 if tokens <= cuda.MOST_TOKENS else torch.float16  # that of cuBLAS's results
        outs = [torch.empty(tokens, rows, device=gpu.DEVICE, dtype=kind) for rows in product.rows]
        digits, scratch = cuda.to_digits(x, GROUP_SIZE), cuda.Scratch(torch.device(gpu.DEVICE))
        graphs = {"float16": rotating(matrices, about, multiply_half, x)}
        checks = {}
        for precision in MULTIPLIED:
            seen = lowered(rotated, precision)
            arranged = product.name != "o" and hopper_halves.serves(seen[0])  # attention is the library's
            given = hopper_halves.arranged(x, hopper_halves.columns_of(tokens)) if arranged else x
            how = multiply_many, digits, given, outs, scratch, arranged
            graphs[str(precision)] = rotating(seen, about / 2, *how)
            checks[str(precision)] = check(rotated[0], precision, tokens)
        tell_wrong(f"{product.name}, {tokens} tokens", checks)
        results[str(tokens)] = {"seconds": alternate(graphs, asked.rounds), "checks": checks}
    return results


def multiply_many(
    matrices: list[Packed],
    digits: Any,
    x: torch.Tensor,
    outs: list[torch.Tensor],
    scratch: cuda.Scratch,
    arranged: bool = False,
) -> None:
    """Tokens that are integers already, or float16."""
    if len(outs[0]) <= cuda.MOST_TOKENS:
        cuda.products(digits, len(outs[0]), matrices, outs, scratch=scratch)
    else:
        cuda.multiply_halves(x, matrices, outs, scratch=scratch, early=True, arranged=arranged)


def print_speedups(title: str, by_column: dict[str, dict[str, float]]) -> None:
    say(f"\n{title}")
    say(f"{'':22}" + "".join(f"{column:>18}" for column in by_column))
    for name in next(iter(by_column.values())):
        cells = (f"{one[name] * 1e6:9.2f} {one['float16'] / one[name]:6.2f}x" for one in by_column.values())
        say(f"{name:22}" + "".join(f"{cell:>18}" for cell in cells))


# One matrix, every way --------------------------------------------------------------------------------------


def batch(asked: Settings) -> dict[str, Any]:
    """One large matrix times 1 to 128 tokens: straight from the planes by integers and by halves, decoded tiles and a GEMM,
    cuBLAS in float16.
    """
    rows, length = BATCH_SHAPE
    precisions = [Precision("E5M8"), Precision("E5M4")]
    made = copies(matrix_bytes(rows, length, precisions[-1]), lambda: random_packed(rows, length))
    plain = [gpu.halves(rows, length) for _ in range(2)]
    results: dict[str, dict[str, Any]] = {}
    for tokens in BATCHES:
        x = torch.randn(tokens, length, device=gpu.DEVICE, dtype=torch.float16)
        about = 40e-6 + 4e-6 * tokens
        contenders, checks = {"float16": rotating(plain, about, multiply_half, x, most=40)}, {}
        for precision in precisions:
            matrices = [at(packed, precision) for packed in made]
            for name, how in ROADS.items():
                contenders[f"{precision} {name}"] = rotating(matrices, about, how, x, most=40)
            checks[str(precision)] = check(made[:1], precision, tokens)
            checks[f"{precision} decoded"] = check_decoded(x, matrices[0])
        tell_wrong(f"{tokens} tokens", checks)
        results[str(tokens)] = {"seconds": alternate(contenders, asked.rounds), "checks": checks}
    print_batch(results)
    return {"shape": list(BATCH_SHAPE), "copies": len(made), "tokens": results}


def by_integers(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    return cuda.linear(x, packed)


def by_halves(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), len(packed.base), dtype=x.dtype, device=x.device)
    cuda.multiply_halves(x, [packed], [out])
    return out


def by_tiles(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """Weights decoded tile by tile before they are multiplied."""
    thresholds = cuda.INTEGER_TOKENS, halves.MOST_TOKENS
    cuda.INTEGER_TOKENS, halves.MOST_TOKENS = (0,) * 6, 0
    try:
        return cuda.matmul(x, packed)
    finally:
        cuda.INTEGER_TOKENS, halves.MOST_TOKENS = thresholds


def by_whole(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    return linear(x, cuda.decode(packed, x.dtype))


ROADS = {"integers": by_integers, "halves": by_halves, "tiles": by_tiles, "whole": by_whole}


def check_decoded(x: torch.Tensor, packed: Packed) -> dict[str, Any]:
    """Products in float16 against float64; decoded values are rounded on the way."""
    some = torch.randint(len(packed.base), (CHECKED,), device=gpu.DEVICE)
    exact = x.cpu().double() @ reference.decode(on_cpu(packed.rows(some))).double().T
    errors = {}
    for name in ("halves", "tiles", "whole"):
        found = ROADS[name](packed, x)[:, some].cpu().double()
        errors[name] = float((found - exact).norm() / exact.norm())
    return {"errors": errors, "wrong": not all(error < 1e-2 for error in errors.values())}


def print_batch(results: dict[str, dict[str, Any]]) -> None:
    """Microseconds by tokens, and who is fastest."""
    passes = f"integers: passes of {cuda.MOST_TOKENS} tokens, quantizing included"
    say(f"\n{BATCH_SHAPE[0]} x {BATCH_SHAPE[1]}, us by tokens ({passes})")
    say(f"{'':18}" + "".join(f"{tokens:>9}" for tokens in results))
    columns = [result["seconds"] for result in results.values()]
    for name in columns[0]:
        say(f"{name:18}" + "".join(f"{seconds[name] * 1e6:9.1f}" for seconds in columns))
    for precision in ("E5M8", "E5M4"):
        fastest = [min((seconds[f"{precision} {road}"], road) for road in ROADS)[1] for seconds in columns]
        say(f"{precision + ' fastest':18}" + "".join(f"{road:>9}" for road in fastest))


# Quantizing -------------------------------------------------------------------------------------------------


def quantize(asked: Settings) -> dict[str, Any]:
    """The fused quantize kernel of tuning: share of the speed of a copy, weights read once and written once."""
    results: dict[str, Any] = {}
    say(f"\nquantizing for a tuning step at E5M4 (copy: {asked.copy_rate / 1e12:.2f} TB/s)")
    say(f"{'':56}{'MB':>9}{'us':>9}{'TB/s':>7}{'of copy':>9}{'host, us':>10}")
    for model, shapes in weight_sets(asked.quick):
        weights = [torch.randn(shape, device=gpu.DEVICE) * 0.02 for shape in shapes]
        for out in (torch.bfloat16, torch.float32):
            results |= quantized_set(model, weights, out, asked)
        del weights
        gpu.release()
    return results


def weight_sets(quick: bool) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Shapes of the linears that a step quantizes together."""
    layer = [(rows, product.length) for product in PRODUCTS[:-1] for rows in product.rows]
    yield "LLaMA-3-8B, 2 layers", layer * (1 if quick else 2)
    yield "SmolLM2-135M", [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)] * 30


def quantized_set(model: str, weights: list[torch.Tensor], out: torch.dtype, asked: Settings) -> dict[str, Any]:
    """Time the kernel on one set of weights into one type, and torch's plain conversion of as many weights beside it."""
    from otaro.tune import fused

    count = sum(weight.numel() for weight in weights)
    size = count * (weights[0].element_size() + out.itemsize)

    def run(_: int = 0) -> list[torch.Tensor]:
        return fused.quantize_all(weights, 4, GROUP_SIZE, "midpoint", out, fused.BEST)

    flat, target = torch.randn(count, device=gpu.DEVICE), torch.empty(count, dtype=out, device=gpu.DEVICE)
    ours, copy = f"tile {fused.BEST.tile}, {fused.BEST.warps} warps", "copy_"
    contenders = {ours: capture(run, 8), copy: capture(lambda _: target.copy_(flat), 8)}
    some = weights[0][:64].contiguous()
    expected = fake_quant.quantize(some.cpu(), 4, GROUP_SIZE, "midpoint").to(out)
    results = {}
    for name, seconds in alternate(contenders, asked.rounds).items():
        rate, title = size / seconds, f"{model} to {str(out).removeprefix('torch.')}: {name}"
        host = host_seconds(run) if name == ours else 0.0
        wrong = name == ours and not torch.equal(run()[0][:64].cpu(), expected)
        share = f"{rate / asked.copy_rate:9.0%}{host * 1e6:10.0f}{' WRONG' if wrong else ''}"
        say(f"{title:56}{size / 1e6:9.1f}{seconds * 1e6:9.1f}{rate / 1e12:7.2f}{share}")
        found = {"seconds": seconds, "bytes": size, "of_copy": rate / asked.copy_rate, "host_seconds": host}
        results[title] = {**found, "wrong": wrong, "best": name == ours}
    return results


def host_seconds(run: Callable[[], Any], rounds: int = 20) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    seconds = (time.perf_counter() - started) / rounds
    torch.cuda.synchronize()
    return seconds
