"""Parts of bench_table2.py that need no model: products of one token, of many, and the quantizing of a tuning step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gpu
import torch
from gpu import Captured, alternate, capture, enough, medians
from llama3 import PRODUCTS, Product, at, matrix_bytes, random_packed
from torch.nn.functional import linear

from otaro.kernels import cuda, halves, reference
from otaro.kernels.packed import Packed
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, Precision
from otaro.tune import fake_quant

ROTATED = 200_000_000
"""Bytes that the copies of a matrix take at least, so that it comes from memory and not from the cache of 60 MB."""
CHECKED = 48  # rows
TOLERANCE = 1e-3  # relative error of a product; integers of 16 bits are good for 1e-4
BATCH_SHAPE = (28672, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Settings(NamedTuple):
    """What all parts are told."""

    rounds: int
    copy_rate: float
    """Bytes a second of a plain copy."""
    quick: bool = False


def say(text: str = "") -> None:
    print(text, flush=True)


def gemv(asked: Settings) -> dict[str, Any]:
    """Every product of the model with one token, at every precision, beside cuBLAS in float16."""
    results = {}
    for product in PRODUCTS:
        results[product.name] = one_product(product, asked)
        gpu.release()
        print_product(product.name, results[product.name], asked.copy_rate)
    total = summed({name: result["seconds"] for name, result in results.items()})
    print_sums(total)
    return {"products": results, "summed_seconds": total}


def one_product(product: Product, asked: Settings) -> dict[str, Any]:
    """Seconds of each contender on copies of the matrices, after a check on numbers of their own."""
    smallest = sum(matrix_bytes(rows, product.length, PRECISIONS[-1]) for rows in product.rows)
    copies = ROTATED // smallest + 1
    rotated = [[random_packed(rows, product.length, gpu.DEVICE) for rows in product.rows] for _ in range(copies)]
    checks = {str(p): check(rotated[0], p) for p in PRECISIONS}
    for name, outcome in checks.items():
        if outcome["wrong"]:
            say(f"WRONG: {product.name} at {name}: {outcome}")
    outs = [torch.empty(1, rows, device=gpu.DEVICE) for rows in product.rows]
    x = torch.randn(1, product.length, device=gpu.DEVICE, dtype=torch.float16)
    contenders = {"float16": half(product, x)}
    for precision in PRECISIONS:
        matrices = [[at(packed, precision) for packed in one] for one in rotated]
        launches = enough(moved(product, precision) / 3e12 + 2e-6, copies)
        digits = cuda.to_digits(x, GROUP_SIZE)
        contenders[str(precision)] = capture(partial(multiply, matrices, digits, outs), launches)
        contenders[f"{precision} + quantize"] = capture(partial(quantize_multiply, matrices, x, digits, outs), launches)
    contenders["float16 again"] = contenders["float16"]  # how far the same thing is from itself
    seconds = medians(alternate(contenders, asked.rounds))
    moves = {"float16": moved(product, None), **{str(precision): moved(product, precision) for precision in PRECISIONS}}
    shape = [sum(product.rows), product.length]
    return {"shape": shape, "copies": copies, "bytes": moves, "seconds": seconds, "checks": checks}


def half(product: Product, x: torch.Tensor) -> Captured:
    """Float16 through cuBLAS, all matrices of the product in one."""
    size = matrix_bytes(sum(product.rows), product.length, None)
    copies = ROTATED // size + 1
    matrices = [torch.empty(sum(product.rows), product.length, dtype=torch.float16, device=gpu.DEVICE) for _ in range(copies)]
    for matrix in matrices:
        matrix.normal_(std=0.02)
    return capture(partial(rotate_half, x, matrices), enough(size / 4e12 + 2e-6, copies))


def rotate_half(x: torch.Tensor, matrices: list[torch.Tensor], number: int) -> None:
    """One copy of a matrix times some tokens, in float16 throughout."""
    linear(x, matrices[number % len(matrices)])


def multiply(rotated: list[list[Packed]], digits: Any, outs: list[torch.Tensor], number: int) -> None:
    """One copy of the matrices times one token that is integers already."""
    cuda.products(digits, 1, rotated[number % len(rotated)], outs)


def quantize_multiply(rotated: list[list[Packed]], x: torch.Tensor, digits: Any, outs: list[torch.Tensor], number: int) -> None:
    """The same with a launch before it that makes integers."""
    cuda.to_digits(x, GROUP_SIZE, digits)
    cuda.products(digits, 1, rotated[number % len(rotated)], outs)


def moved(product: Product, precision: Precision | None) -> int:
    """Bytes that a product reads and writes: weights, activations in float16 or as integers, results."""
    rows = sum(product.rows)
    weights = sum(matrix_bytes(one, product.length, precision) for one in product.rows)
    if precision is None:
        return weights + 2 * (product.length + rows)
    return weights + 2 * product.length + product.length // 8 + 4 * rows


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
        some = torch.cat([torch.tensor([0, len(packed.base) - 1]), torch.randint(len(packed.base), (CHECKED,))]).to(gpu.DEVICE)
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
    """The same in the host's memory."""
    base, scales, *planes = (part.cpu() for part in (packed.base, packed.scales, *packed.planes))
    return packed._replace(base=base, scales=scales, planes=planes)


def summed(seconds: dict[str, dict[str, float]]) -> dict[str, float]:
    """Seconds of all products of one token: the layers' as often as there are layers, the head's once."""
    names = [name for name in seconds[PRODUCTS[0].name] if name in seconds["head"]]
    return {name: sum(product.count * seconds[product.name][name] for product in PRODUCTS) for name in names}


def print_product(name: str, result: dict[str, Any], copy_rate: float) -> None:
    """One shape's table."""
    rows, length = result["shape"]
    seconds, moves = result["seconds"], result["bytes"]
    say(f"\n{name}: {rows} x {length}, one token, {result['copies']} copies in turn")
    head = f"{'':10}{'MB':>9}{'us':>9}{'TB/s':>7}{'of copy':>9}{'speed-up':>10}"
    say(head + f"{'with quantize, us':>19}{'speed-up':>10}{'error':>9}")
    for row, size in moves.items():
        rate, times = size / seconds[row], seconds["float16"] / seconds[row]
        line = f"{row:10}{size / 1e6:9.1f}{seconds[row] * 1e6:9.2f}{rate / 1e12:7.2f}{rate / copy_rate:9.0%}{times:9.2f}x"
        if (quantized := seconds.get(f"{row} + quantize")) is not None:
            line += f"{quantized * 1e6:19.2f}{seconds['float16'] / quantized:9.2f}x{result['checks'][row]['error']:9.1e}"
        say(line)
    say(f"float16 once more: {seconds['float16 again'] * 1e6:.2f} us")


def print_sums(total: dict[str, float]) -> None:
    """The model's table."""
    base = total["float16"]
    say("\nall products of one token (32 layers and the head)")
    say(f"{'':10}{'ms':>9}{'speed-up':>10}{'with quantize, ms':>19}{'speed-up':>10}")
    for name in ("float16", *map(str, PRECISIONS)):
        line = f"{name:10}{total[name] * 1e3:9.3f}{base / total[name]:9.2f}x"
        if (quantized := total.get(f"{name} + quantize")) is not None:
            line += f"{quantized * 1e3:19.3f}{base / quantized:9.2f}x"
        say(line)


def batch(asked: Settings) -> dict[str, Any]:
    """One large matrix times 1 to 128 tokens: straight from the planes by integers and by halves, decoded tiles and a GEMM,
    cuBLAS in float16.
    """
    rows, length = BATCH_SHAPE
    precisions = [Precision("E5M8"), Precision("E5M4")]
    size = matrix_bytes(rows, length, precisions[-1])
    copies = ROTATED // size + 1
    made = [random_packed(rows, length, gpu.DEVICE) for _ in range(copies)]
    plain = [torch.empty(rows, length, dtype=torch.float16, device=gpu.DEVICE).normal_(std=0.02) for _ in range(2)]
    results: dict[str, dict[str, Any]] = {}
    for tokens in BATCHES:
        x = torch.randn(tokens, length, device=gpu.DEVICE, dtype=torch.float16)
        about = 40e-6 + 4e-6 * tokens
        contenders = {"float16": capture(partial(rotate_half, x, plain), enough(about, len(plain), 40))}
        checks = {}
        for precision in precisions:
            matrices = [at(packed, precision) for packed in made]
            for name, how in ROADS.items():
                contenders[f"{precision} {name}"] = capture(partial(along, how, x, matrices), enough(about, copies, 40))
            checks[str(precision)] = check(made[:1], precision, tokens)
            checks[f"{precision} decoded"] = check_decoded(x, matrices[0])
        for name, outcome in checks.items():
            if outcome["wrong"]:
                say(f"WRONG: {tokens} tokens at {name}: {outcome}")
        results[str(tokens)] = {"seconds": medians(alternate(contenders, asked.rounds)), "checks": checks}
    print_batch(results)
    return {"shape": list(BATCH_SHAPE), "copies": copies, "tokens": results}


def by_integers(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return cuda.linear(x, packed)


def by_halves(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    out = torch.empty(len(x), len(packed.base), dtype=x.dtype, device=x.device)
    cuda.multiply_halves(x, [packed], [out])
    return out


def by_tiles(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Weights decoded tile by tile before they are multiplied."""
    thresholds = cuda.INTEGER_TOKENS, halves.MOST_TOKENS
    cuda.INTEGER_TOKENS, halves.MOST_TOKENS = (0,) * 6, 0
    try:
        return cuda.matmul(x, packed)
    finally:
        cuda.INTEGER_TOKENS, halves.MOST_TOKENS = thresholds


def by_whole(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return linear(x, cuda.decode(packed, x.dtype))


ROADS: dict[str, Callable[[torch.Tensor, Packed], torch.Tensor]] = {
    "integers": by_integers,
    "halves": by_halves,
    "tiles": by_tiles,
    "whole": by_whole,
}


def along(how: Callable[..., torch.Tensor], x: torch.Tensor, matrices: list[Packed], number: int) -> None:
    how(x, matrices[number % len(matrices)])


def check_decoded(x: torch.Tensor, packed: Packed) -> dict[str, Any]:
    """Products in float16 against float64; decoded values are rounded on the way."""
    some = torch.randint(len(packed.base), (CHECKED,), device=gpu.DEVICE)
    exact = x.cpu().double() @ reference.decode(on_cpu(packed.rows(some))).double().T
    errors = {}
    for name in ("halves", "tiles", "whole"):
        found = ROADS[name](x, packed)[:, some].cpu().double()
        errors[name] = float((found - exact).norm() / exact.norm())
    return {"errors": errors, "wrong": not all(error < 1e-2 for error in errors.values())}


def print_batch(results: dict[str, dict[str, Any]]) -> None:
    """Microseconds by tokens, and who is fastest."""
    names = list(next(iter(results.values()))["seconds"])
    passes = f"integers: passes of {cuda.MOST_TOKENS} tokens, quantizing included"
    say(f"\n{BATCH_SHAPE[0]} x {BATCH_SHAPE[1]}, us by tokens ({passes})")
    say(f"{'':18}" + "".join(f"{tokens:>9}" for tokens in results))
    for name in names:
        say(f"{name:18}" + "".join(f"{result['seconds'][name] * 1e6:9.1f}" for result in results.values()))
    for precision in ("E5M8", "E5M4"):
        fastest = []
        for result in results.values():
            times = {road: result["seconds"][f"{precision} {road}"] for road in ROADS}
            fastest.append(min(times, key=times.__getitem__))
        say(f"{precision + ' fastest':18}" + "".join(f"{road:>9}" for road in fastest))


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
    layer = [(rows, product.length) for product in PRODUCTS if product.name != "head" for rows in product.rows]
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
    seconds = medians(alternate(contenders, asked.rounds))
    results = {}
    for name in contenders:
        rate, title = size / seconds[name], f"{model} to {str(out).removeprefix('torch.')}: {name}"
        host = host_seconds(run) if name == ours else 0.0
        wrong = name == ours and not torch.equal(run()[0][:64].cpu(), expected)
        share = f"{rate / asked.copy_rate:9.0%}{host * 1e6:10.0f}{' WRONG' if wrong else ''}"
        say(f"{title:56}{size / 1e6:9.1f}{seconds[name] * 1e6:9.1f}{rate / 1e12:7.2f}{share}")
        results[title] = {
            "seconds": seconds[name], "bytes": size, "of_copy": rate / asked.copy_rate, "host_seconds": host, "wrong": wrong,
            "best": name == ours,
        }  # fmt: skip
    return results


def host_seconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """What the host takes to ask for it."""
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    seconds = (time.perf_counter() - started) / rounds
    torch.cuda.synchronize()
    return seconds
