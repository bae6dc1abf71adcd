"""Random hostile calls of the operations, and of the extension behind their back.

Calls are made from a number alone, so a failure can be repeated: `through_ops(seed, number)`. First an honest
problem is made; then its tensors are *disguised* (strides, odd addresses, read-only memory, other types),
which must change nothing; then, in half of the cases, something is *spoiled*. The same call goes to one
backend after the other, and each ends in the reference's answer or in a refusal with words, on all of them
alike; an honest one is never refused.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from otaro.errors import KernelError
from otaro.file.planes import BASE_BYTES, PLANE_BYTES, blocks
from otaro.kernels import cpu, ops, reference
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT

from .packed import Packed, rounding_of_products, same_bits

REFUSALS = (KernelError, ValueError, TypeError)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GROUP_SIZES = (32, 64, 96, 128, 256)
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 96, 127, 160, 200)
HOSTILE_SIZES = (0, -1, -32, 1, 16, 33, 2**15, 2**31 - 1, 2**31, 2**32 + 64, 2**40, 2**62, -(2**62))

NORMALS = np.random.default_rng(0).standard_normal(1 << 14, dtype=np.float32)

ANSWERED, REFUSED = "answered", "refused"
Ends = Counter[str]
Judge = Callable[[list[torch.Tensor]], None]


class Problem:
    """An honest problem, in numpy."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows = rng.choice([0, 1, 2, 3, 4, 5, 9])
        self.length = rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randrange(1, 400)
        self.group_size = rng.choice(GROUP_SIZES)
        self.tokens = rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 8, 9, 12])
        self.truncate = rng.random() < 0.5
        groups, count = -(-self.length // self.group_size), rng.randrange(6)
        self.base = self._stored(BASE_BYTES)
        self.planes = [self._stored(PLANE_BYTES) for _ in range(count)]
        self.scales = _bytes(rng, (self.rows, groups))
        self.scale_exponent = rng.randrange(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT + 1)
        self.ids = np.array(
            [rng.randrange(self.rows) for _ in range(rng.randrange(5) if self.rows else 0)], np.int64
        )
        with np.errstate(over="ignore"):
            self.x = self._activations()

    def _stored(self, per_block: int) -> np.ndarray:
        shape, kind = (self.rows, per_block * blocks(self.length)), self.rng.random()
        if kind < 0.2:
            return np.full(shape, 0 if kind < 0.1 else 255, np.uint8)
        return _bytes(self.rng, shape)

    def _activations(self) -> np.ndarray:
        rng, shape = self.rng, (self.tokens, self.length)
        start = rng.randrange(len(NORMALS) // 2)
        x = NORMALS[start : start + self.tokens * self.length].reshape(shape).copy()
        some = _bytes(rng, shape)
        match rng.randrange(8):
            case 0:
                x *= np.float32(2.0 ** rng.randrange(-149, 128))
            case 1:
                x[some < 10] = rng.choice([np.nan, np.inf, -np.inf])
            case 2:
                x = np.where(x < 0, np.float32(-32639), np.float32(32639))
            case 3:
                x = np.sign(x) * np.finfo(np.float32).max
            case 4:
                x *= np.exp2(some.astype(np.float32) - 140)
            case 5:
                x[:] = 0
        return x.astype(np.float32)


def _bytes(rng: random.Random, shape: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(bytearray(rng.randbytes(shape[0] * shape[1])), np.uint8).reshape(shape)


def through_ops(seed: int, number: int) -> Ends:
    """A call of an operation, whole or spoiled, on some backends; says how it ended, and on how many."""
    rng = random.Random(f"operations {seed} {number}")
    problem = Problem(rng)
    dtype = FLOATS[rng.randrange(3)]
    packed = {
        "base": _disguised(problem.base, rng),
        "scales": _disguised(problem.scales, rng),
        "planes": [_disguised(plane, rng) for plane in problem.planes],
        "length": problem.length,
        "group_size": problem.group_size,
        "truncate": problem.truncate,
        "scale_exponent": problem.scale_exponent,
    }
    name = rng.choice(["linear", "linear", "linear", "decode", "embedding", "quantize"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow in the conversion is meant
        x = _disguised(problem.x, rng).to(dtype)
    if rng.random() < 0.2:
        x.requires_grad_()
    match name:
        case "linear":
            bias = torch.from_numpy(NORMALS[: problem.rows]).to(dtype) if rng.random() < 0.3 else None
            args = {"x": x, **packed, "bias": bias}
        case "decode":
            args = {**packed, "dtype": dtype}
        case "embedding":
            ids = _disguised(problem.ids, rng)
            args = {"ids": ids.int() if rng.random() < 0.3 else ids, **packed, "dtype": dtype}
        case _:
            args = {"x": x, "group_size": problem.group_size}
    honest = rng.random() < 0.5
    if not honest:
        for _ in range(rng.randrange(1, 3)):
            _spoil(args, rng)
    ends, judge = Counter(), None
    for backend in [
        *(f"cpu:{one}" for one in cpu.available()),
        *(["reference"] if cpu.MISSING or number % 4 == 0 else []),
    ]:
        os.environ[ops.OVERRIDE] = backend
        try:
            got = getattr(torch.ops.otaro, name)(**args)
        except REFUSALS as refusal:
            _accept(refusal, honest)
            ends[REFUSED] += 1
            continue
        judge = judge or _judge(name, args)
        judge([got] if isinstance(got, torch.Tensor) else list(got))
        ends[ANSWERED] += 1
    assert len(ends) == 1, f"backends do not agree whether {name} is refused: {dict(ends)}"
    return ends


def _accept(refusal: Exception, honest: bool) -> None:
    assert str(refusal), "a refusal says why"
    assert not honest, f"an honest call was refused: {refusal}"


def _disguised(array: np.ndarray, rng: random.Random) -> torch.Tensor:
    """The same numbers in another form: strides, odd addresses, read-only memory."""
    match rng.randrange(7):
        case 0:  # every other number of a longer one
            wide = np.repeat(array, 2, -1)
            return torch.from_numpy(wide)[..., ::2]
        case 1 if array.ndim == 2:
            return torch.from_numpy(np.ascontiguousarray(array.T)).T
        case 2 if array.size:
            memory = bytearray(b"\0" + array.tobytes())
            return torch.frombuffer(memory, dtype=torch.from_numpy(array).dtype, offset=1).view(array.shape)
        case 3 if array.size:
            fixed = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that nobody must write to it
                return torch.from_numpy(fixed)
        case 4 if len(array):  # equal rows, stored once
            array[:] = array[:1]
            return torch.from_numpy(array[:1].copy()).expand(array.shape)
        case 5:  # from the middle of a larger one
            around = np.zeros((len(array) + 3, *array.shape[1:]), array.dtype)
            around[2:-1] = array
            return torch.from_numpy(around)[2:-1]
    return torch.from_numpy(array.copy())


def _spoil(args: dict[str, Any], rng: random.Random) -> None:
    """Change one argument into something that nobody should pass."""
    name = rng.choice(list(args))
    value = args[name]
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        near = value + rng.randrange(-70, 71)
        args[name] = rng.choice(HOSTILE_SIZES) if rng.random() < 0.7 else near
    elif name == "planes":
        planes = list(value)
        if planes and rng.random() < 0.6:
            at = rng.randrange(len(planes))
            planes[at] = _spoiled(planes[at], rng)
        else:
            planes += [torch.zeros((*args["base"].shape[:-1], 4), dtype=torch.uint8)] * rng.randrange(1, 7)
        args[name] = planes
    elif isinstance(value, torch.dtype):
        args[name] = (torch.float64, torch.int8, torch.bool, torch.complex64)[rng.randrange(4)]
    elif value is None:
        args[name] = torch.zeros(rng.randrange(4))
    else:
        args[name] = _spoiled(value, rng)


def _spoiled(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    tensor = tensor.detach()
    if (
        not tensor.dim()
        or tensor.layout != torch.strided
        or tensor.dtype.is_complex
        or tensor.dtype == torch.bool
        or tensor.is_meta
    ):
        return tensor  # spoiled already
    match rng.randrange(11):
        case 0:
            return tensor.to("meta")
        case 1:
            return tensor.to(_other_dtype(tensor, rng))
        case 2:
            return tensor.unsqueeze(rng.randrange(tensor.dim() + 1))
        case 3:
            return tensor.flatten()
        case 4:
            return tensor[..., : rng.randrange(tensor.shape[-1] + 1)]
        case 5:
            return torch.cat((tensor, tensor), -1)
        case 6:
            return tensor[: rng.randrange(len(tensor) + 1)]
        case 7:
            return torch.cat((tensor, tensor), 0)
        case 8:
            return tensor.to_sparse() if tensor.numel() else tensor[..., None]
        case 9:
            return torch.zeros((), dtype=tensor.dtype)
    # Numbers that do not belong there: ids out of range; bytes and activations may be anything.
    if tensor.is_floating_point():
        return torch.full_like(
            tensor, float(rng.choice([np.nan, np.inf, torch.finfo(tensor.dtype).max, 0.0]))
        )
    limits = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, rng.choice([limits.min, limits.max, 17]))


def _other_dtype(tensor: torch.Tensor, rng: random.Random) -> torch.dtype:
    others = (
        torch.float64,
        torch.int32,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.bool,
        torch.complex64,
        torch.float16,
    )
    return others[rng.randrange(len(others))]


def _judge(name: str, args: dict[str, Any]) -> Judge:
    """What judges answers: they are the reference's. Arguments without numbers have an answer without."""
    given = [value for value in args.values() if isinstance(value, torch.Tensor)]
    if any(tensor.is_meta for tensor in given):

        def judge_fake(got: list[torch.Tensor]) -> None:
            assert all(tensor.is_meta for tensor in (*got, *given))

        return judge_fake
    plain = {k: [p.clone() for p in v] if isinstance(v, list) else v for k, v in args.items()}
    plain = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}
    if name == "quantize":
        expected = list(reference.quantize(plain["x"], plain["group_size"]))
    else:
        packed = Packed(**{field: plain[field] for field in Packed._fields})
        if name == "decode":
            expected = [reference.decode(packed, plain["dtype"])]
        elif name == "embedding":
            expected = [reference.embedding(plain["ids"].long(), packed, plain["dtype"])]
        elif len(plain["x"]) > ops.FEW_TOKENS:
            return _judge_matmul(plain["x"], reference.decode(packed), plain["bias"])
        else:
            product = reference.linear(plain["x"], packed)
            expected = [(product if plain["bias"] is None else product + plain["bias"]).to(plain["x"].dtype)]

    def judge(got: list[torch.Tensor]) -> None:
        for one, other in zip(got, expected, strict=True):
            assert same_bits(one.detach(), other), (
                f"{name} on {os.environ[ops.OVERRIDE]} differs from the reference"
            )

    return judge


def _judge_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Judge:
    """Each product is exact but for rounding, where nothing overflows on the way."""
    limits = torch.finfo(x.dtype)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias, sizes + bias.double().abs()
    bound = rounding_of_products(x, weight, bias)
    judged = sizes < limits.max / 4

    def judge(got: list[torch.Tensor]) -> None:
        assert got[0].dtype == x.dtype
        assert got[0].shape == (len(x), len(weight))
        wrong = judged & ~((got[0].detach().double() - exact).abs() <= bound)
        assert not wrong.any(), f"a product of many tokens is wrong at {wrong.nonzero()[0].tolist()}"

    return judge


# Behind the back of the operations


CANARY = 24  # numbers before and after an output that nobody may touch


class Output:
    """An array to be written to in the middle of memory that must stay as it is."""

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        self.memory = np.full(math.prod(shape) + 2 * CANARY, 77, dtype)
        self.array = self.memory[CANARY : len(self.memory) - CANARY].reshape(shape)

    def check(self) -> None:
        assert (self.memory[:CANARY] == 77).all(), "something was written before the output"
        assert (self.memory[len(self.memory) - CANARY :] == 77).all(), (
            "something was written behind the output"
        )


def through_extension(seed: int, number: int) -> Ends:
    """A call of the extension, whole or spoiled, with all instruction sets; says how it ended."""
    extension = cpu._cpu
    rng = random.Random(f"extension {seed} {number}")
    problem = Problem(rng)
    unit = extension.unit_size(problem.group_size)
    units = -(-problem.length // unit)
    packed = [getattr(problem, field) for field in Packed._fields]
    x = problem.x
    name = rng.choice(["linear", "linear", "dots", "quantize", "decode"])
    match name:
        case "linear":
            outputs = [Output((problem.tokens, problem.rows), np.float32)]
            args = [x, *packed, outputs[0].array]
        case "dots":
            x = x[:8]
            outputs = [Output((len(x), problem.rows, units), np.int32)]
            args = [x, *packed, outputs[0].array]
        case "quantize":
            outputs = [Output(x.shape, np.int16), Output((len(x), units), np.float32)]
            args = [x, problem.group_size, *(output.array for output in outputs)]
        case _:
            rows = problem.ids.astype(np.int64) if rng.random() < 0.5 else None
            outputs = [Output((problem.rows if rows is None else len(rows), problem.length), np.float32)]
            args = [*packed, rows, outputs[0].array]
    honest = rng.random() < 0.5
    if not honest:
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(args))
            args[at] = _spoiled_argument(args[at], rng)
    ends, expected = Counter(), None
    for instructions in extension.available():
        extension.choose(instructions)
        extension.set_threads(rng.choice([1, 1, 1, 2, 3]))
        for output in outputs:
            output.array.fill(77)  # what another instruction set wrote is no answer of this one
        try:
            getattr(extension, name)(*args)
        except REFUSALS as refusal:
            _accept(refusal, honest)
            ends[REFUSED] += 1
            continue
        finally:
            for output in outputs:
                output.check()
        expected = expected or _expected_of_extension(name, args)
        for got, answer in zip(args[-len(expected) :], expected, strict=True):
            assert same_bits(_tensor(got), answer), f"{name} with {instructions} differs from the reference"
        ends[ANSWERED] += 1
    assert len(ends) == 1, f"instruction sets do not agree whether {name} is refused: {dict(ends)}"
    return ends


def _spoiled_argument(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return [0, 1, "no", None, 2.5][rng.randrange(5)]
    if isinstance(value, int):
        return [rng.choice(HOSTILE_SIZES), value + rng.randrange(-70, 71), 2**63, -(2**70), 1.5, "64"][
            rng.randrange(6)
        ]
    if isinstance(value, list):
        if value and rng.random() < 0.6:
            at = rng.randrange(len(value))
            return [*value[:at], _spoiled_argument(value[at], rng), *value[at + 1 :]]
        return [*value, *[np.zeros((2, 4), np.uint8)] * rng.randrange(1, 8)] if rng.random() < 0.5 else None
    if value is None:
        return np.zeros(2, np.int64)
    if not isinstance(value, np.ndarray) or value.ndim == 0 or not value.dtype.isnative:  # spoiled already
        return value
    spoilers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: value.tolist(),
        lambda: value.astype(rng.choice(["f8", "f4", "?", ">f4", "c8"])),
        lambda: np.zeros(value.shape, rng.choice(["i4", "u1", "i1", "i8", ">i8"])),
        lambda: np.asfortranarray(value) if value.ndim > 1 else value[::2],
        lambda: np.repeat(value, 2, -1)[..., ::2],
        lambda: value[..., None],
        lambda: value.reshape(-1),
        lambda: value[..., : rng.randrange(value.shape[-1] + 1)].copy(),
        lambda: value[: rng.randrange(len(value) + 1)],
        lambda: np.concatenate((value, value), 0),
        lambda: np.concatenate((value, value), -1),
        lambda: value[::-1],
        lambda: np.broadcast_to(value[:1], value.shape) if len(value) else value,
        lambda: _misaligned(value),
        lambda: _read_only(value),
        lambda: torch.from_numpy(value.copy()),
        lambda: (
            np.full_like(value, rng.choice([-128, -16, 17, 127]))
            if value.dtype != np.uint8
            else np.full_like(value, 255)
        ),
    ]
    return spoilers[rng.randrange(len(spoilers))]()


def _misaligned(value: np.ndarray) -> np.ndarray:
    return (
        np.frombuffer(bytearray(b"\0" + value.tobytes()), value.dtype, offset=1).reshape(value.shape)
        if value.size
        else value
    )


def _read_only(value: np.ndarray) -> np.ndarray:
    copy = value.copy()
    copy.flags.writeable = False
    return copy


def _tensor(value: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.clone()


def _expected_of_extension(name: str, args: list[Any]) -> list[torch.Tensor]:
    """A call that was answered fits the contract of the reference; this is its answer."""
    if name == "quantize":
        return list(reference.quantize(_tensor(args[0]), args[1]))
    first = 0 if name == "decode" else 1
    base, scales, planes, *numbers = args[first : first + len(Packed._fields)]
    packed = Packed(_tensor(base), _tensor(scales), [_tensor(plane) for plane in planes], *numbers)
    if name == "linear":
        return [reference.linear(_tensor(args[0]), packed)]
    if name == "dots":
        codes, _ = reference.quantize(_tensor(args[0]), packed.group_size)
        return [reference.dots(codes, packed).int()]
    values = reference.decode(packed)
    rows = args[len(Packed._fields)]
    return [values if rows is None else values[_tensor(rows)]]
