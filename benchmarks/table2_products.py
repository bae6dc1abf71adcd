"""Parts of bench_table2.py that need no model: products of tokens, beside cuBLAS in float16."""

from __future__ import annotations

from typing import Any

import gpu
import torch
from gpu import alternate, copies, rotating, say
from llama3 import PRODUCTS, Product, at, matrix_bytes, random_packed
from torch import Tensor
from torch.nn.functional import linear

from otaro.kernels import cuda, halves, hopper_halves, reference
from otaro.kernels.packed import Packed
from otaro.sefp.precision import GROUP_SIZE, Precision

CHECKED = 48  # rows
TOLERANCE = 1e-3  # relative error of a product; integers of 16 bits are good for 1e-4
ROUNDED = 1e-2  # of one in float16 throughout
BATCH_SHAPE = (28672, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LAYER_TOKENS = (1, 4, 8, 16, 32, 64, 128)
MULTIPLIED = [Precision(name) for name in ("E5M8", "E5M4", "E5M3")]


def multiply_half(matrix: Tensor, x: Tensor) -> None:
    """In float16 throughout, by cuBLAS."""
    linear(x, matrix)


def half_seconds(size: int) -> float:
    """About what a product in float16 takes that moves so many bytes."""
    return size / 4e12 + 2e-6


# A layer ----------------------------------------------------------------------------------------------------


def layer(rounds: int) -> dict[str, Any]:
    """Every product of a layer with 1 to 128 tokens as kernels before it leave them; the head's with one."""
    results, tables, total = {}, {}, {}
    for product in PRODUCTS:
        results[product.name] = found = of_product(product, rounds)
        tables[product.name] = {tokens: one["seconds"] for tokens, one in found.items()}
        gpu.release()
    names = ("float16", *map(str, MULTIPLIED))
    for tokens in map(str, LAYER_TOKENS):
        total[tokens] = {name: sum(tables[one.name][tokens][name] for one in PRODUCTS[:-1]) for name in names}
    model = {name: sum(one.count * tables[one.name]["1"][name] for one in PRODUCTS) for name in names}
    for title, by_tokens in (tables | {"a layer": total, "32 layers and the head": {"1": model}}).items():
        print_speedups(f"{title}, us by tokens (times float16)", by_tokens)
    return {"products": results, "summed_seconds": total, "model_seconds": model}


def of_product(product: Product, rounds: int) -> dict[str, Any]:
    """Seconds by tokens and contender, after checks on numbers of their own."""
    half, coarsest = product.nbytes(None), product.nbytes(MULTIPLIED[-1])
    rotated = copies(coarsest, lambda: [random_packed(rows, product.length) for rows in product.rows])
    matrices = copies(half, lambda: gpu.halves(sum(product.rows), product.length))  # all in one
    about, results = half_seconds(half), {}
    for tokens in LAYER_TOKENS if product.count > 1 else (1,):  # the head sees the last token alone
        x = torch.randn(tokens, product.length, device=gpu.DEVICE, dtype=torch.float16)
        kind = torch.float32 if tokens <= cuda.MOST_TOKENS else torch.float16  # that of cuBLAS's results
        outs = [torch.empty(tokens, rows, device=gpu.DEVICE, dtype=kind) for rows in product.rows]
        digits, scratch = cuda.to_digits(x, GROUP_SIZE), cuda.Scratch(torch.device(gpu.DEVICE))
        graphs = {"float16": rotating(matrices, about, multiply_half, x)}
        checks = {}
        for precision in MULTIPLIED:
            seen = [[at(packed, precision) for packed in one] for one in rotated]
            arranged = product.name != "o" and hopper_halves.serves(seen[0])  # attention is the library's
            given = hopper_halves.arranged(x, hopper_halves.columns_of(tokens)) if arranged else x
            how = multiply_many, digits, given, outs, scratch, arranged
            graphs[str(precision)] = rotating(seen, about / 2, *how)
            checks[str(precision)] = check(seen[0], tokens)
        tell_wrong(f"{product.name}, {tokens} tokens", checks)
        results[str(tokens)] = {"seconds": alternate(graphs, rounds), "checks": checks}
    return results


def multiply_many(
    matrices: list[Packed], digits: Any, x: Tensor, outs: list[Tensor], scratch: Any, arranged: bool = False
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


# Checks -----------------------------------------------------------------------------------------------------


def check(matrices: list[Packed], tokens: int = 1) -> dict[str, Any]:
    """Some rows of a launch, integers bit for bit as the reference has them; every row must be written."""
    x = torch.randn(tokens, matrices[0].length, device=gpu.DEVICE).half().float()
    outs = [torch.full((tokens, len(packed.base)), torch.nan, device=gpu.DEVICE) for packed in matrices]
    integers = tokens <= cuda.MOST_TOKENS
    if integers:
        cuda.products(cuda.to_digits(x, GROUP_SIZE), tokens, matrices, outs)
    else:
        cuda.multiply_halves(x.half(), matrices, outs)
    same, errors = True, []
    for packed, out in zip(matrices, outs, strict=True):
        found, few, error = sampled(x, packed, out)
        same &= not integers or torch.equal(found, reference.linear(x.cpu(), few))
        errors.append(error)
    unwritten = sum(int(out.isnan().sum()) for out in outs)
    right = same and not unwritten and all(error < TOLERANCE for error in errors)
    return {"errors": errors, "same_bits": same, "unwritten": unwritten, "wrong": not right}


def check_roads(x: Tensor, packed: Packed) -> dict[str, Any]:
    """Products in float16; decoded values are rounded on the way."""
    errors = {name: sampled(x, packed, ROADS[name](packed, x))[2] for name in ("halves", "decoded")}
    return {"errors": errors, "wrong": not all(error < ROUNDED for error in errors.values())}


def sampled(x: Tensor, packed: Packed, out: Tensor) -> tuple[Tensor, Packed, float]:
    """On the CPU: products of some rows, those rows, and how far the former are from float64."""
    rows = len(packed.base)
    some = torch.cat([torch.tensor([0, rows - 1]), torch.randint(rows, (CHECKED,))]).to(gpu.DEVICE)
    seen = packed.rows(some)
    base, scales, *planes = (part.cpu() for part in (seen.base, seen.scales, *seen.planes))
    few, found = seen._replace(base=base, scales=scales, planes=planes), out[:, some].cpu()
    exact = x.cpu().double() @ reference.decode(few).double().T
    return found, few, float((found.double() - exact).norm() / exact.norm())


def tell_wrong(what: str, checks: dict[str, dict[str, Any]]) -> None:
    for name, outcome in checks.items():
        if outcome["wrong"]:
            say(f"WRONG: {what} at {name}: {outcome}")


# One matrix, every way --------------------------------------------------------------------------------------


def by_halves(packed: Packed, x: Tensor) -> Tensor:
    out = torch.empty(len(x), len(packed.base), dtype=x.dtype, device=x.device)
    cuda.multiply_halves(x, [packed], [out])
    return out


def decoded(packed: Packed, x: Tensor) -> Tensor:
    """Weights decoded tile by tile before they are multiplied."""
    thresholds = cuda.INTEGER_TOKENS, halves.MOST_TOKENS
    cuda.INTEGER_TOKENS, halves.MOST_TOKENS = (0,) * 6, 0
    try:
        return cuda.matmul(x, packed)
    finally:
        cuda.INTEGER_TOKENS, halves.MOST_TOKENS = thresholds


ROADS = {"integers": lambda packed, x: cuda.linear(x, packed), "halves": by_halves, "decoded": decoded}


def batch(rounds: int) -> dict[str, Any]:
    """One large matrix times 1 to 128 tokens: from its planes by integers or halves, decoded, in float16."""
    rows, length = BATCH_SHAPE
    precisions = [Precision("E5M8"), Precision("E5M4")]
    made = copies(matrix_bytes(rows, length, precisions[-1]), lambda: random_packed(rows, length))
    plain = [gpu.halves(rows, length) for _ in range(2)]
    results: dict[str, dict[str, Any]] = {}
    for tokens in BATCHES:
        x = torch.randn(tokens, length, device=gpu.DEVICE, dtype=torch.float16)
        about = 40e-6 + 4e-6 * tokens
        contenders, checks = {"float16": rotating(plain, about, multiply_half, x)}, {}
        for precision in precisions:
            matrices = [at(packed, precision) for packed in made]
            for name, how in ROADS.items():
                contenders[f"{precision} {name}"] = rotating(matrices, about, how, x)
            checks[str(precision)] = check(matrices[:1], tokens)
            checks[f"{precision} in float16"] = check_roads(x, matrices[0])
        tell_wrong(f"{tokens} tokens", checks)
        results[str(tokens)] = {"seconds": alternate(contenders, rounds), "checks": checks}
    passes = f"integers: passes of {cuda.MOST_TOKENS} tokens, quantizing included"
    by_tokens = {tokens: result["seconds"] for tokens, result in results.items()}
    print_speedups(f"{rows} x {length}, us by tokens (times float16; {passes})", by_tokens)
    for precision in precisions:
        fastest = [min((one[f"{precision} {road}"], road) for road in ROADS)[1] for one in by_tokens.values()]
        say(f"{f'{precision} fastest':22}" + "".join(f"{road:>18}" for road in fastest))
    return {"shape": list(BATCH_SHAPE), "copies": len(made), "tokens": results}
