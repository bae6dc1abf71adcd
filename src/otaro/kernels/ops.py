"""The operations on packed planes, as torch sees them: `torch.ops.otaro.linear`, `decode`, `embedding` and
`quantize`.

This file is the contract. Arguments are checked here, by the same functions for real and for fake tensors;
what is computed stands in `reference`, and every backend returns the same bits. `backend` says which one
serves a device, and why; the environment variable OTARO_KERNELS overrides the choice:

    reference       plain torch, on any device
    cpu             the C++ extension with the best instructions of this CPU
    cpu:portable    the same with given instructions: portable, avx2, avxvnni, avx512, neon, dotprod, i8mm
    cuda            the CUDA kernels, which NVIDIA GPUs get anyway; refused where they cannot be compiled
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from otaro.errors import KernelError
from otaro.file.planes import BASE_BYTES, BLOCK, PLANE_BYTES, PLANES, blocks
from otaro.kernels import cpu, cuda, nvrtc, reference
from otaro.kernels.packed import Packed
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT

OVERRIDE = "OTARO_KERNELS"
FEW_TOKENS = 8
"""Up to so many tokens a product is computed on integers, straight from the planes; for more, tiles of
weights are decoded.
"""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def backend(device: torch.device | str = "cpu") -> tuple[str, str]:
    """The backend that serves tensors on a device, and the reason in words."""
    asked = os.environ.get(OVERRIDE)
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    if not asked or (asked == "cuda" and on_cpu):
        if device.type == "cuda":
            return _on_cuda(device)
        if not on_cpu:
            return "reference", f"there are no kernels for {device.type} yet"
        return (
            ("reference", cpu.MISSING)
            if cpu.MISSING
            else (f"cpu:{cpu.best()}", "the best that this CPU can run")
        )
    if asked == "reference":
        return "reference", f"{OVERRIDE}={asked}"
    if asked == "cuda":
        name, reason = (
            _on_cuda(device) if device.type == "cuda" else ("reference", f"it does not serve {device.type}")
        )
        if name != "cuda":
            raise KernelError(f"{OVERRIDE}={asked}, but {reason}")
        return name, reason
    name, _, instructions = asked.partition(":")
    if name != "cpu":
        known = ["reference", "cpu", *(f"cpu:{one}" for one in cpu.available()), "cuda"]
        raise KernelError(f"{OVERRIDE}={asked} is none of {', '.join(known)}")
    if cpu.MISSING:
        raise KernelError(f"{OVERRIDE}={asked}, but {cpu.MISSING}")
    if instructions and instructions not in cpu.available():
        raise KernelError(f"{OVERRIDE}={asked}, but this CPU can run {', '.join(cpu.available())} only")
    if not on_cpu:
        return "reference", f"{OVERRIDE}={asked} does not serve {device.type}"
    return f"cpu:{instructions or cpu.best()}", f"{OVERRIDE}={asked}"


def _on_cuda(device: torch.device) -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "reference", "torch sees no NVIDIA GPU"
    index = torch.cuda.current_device() if device.index is None else device.index
    if reason := nvrtc.missing(index):
        return "reference", reason
    return "cuda", f"{torch.cuda.get_device_name(index)}, compiled by {nvrtc.compiler()}"


def _serving(device: torch.device) -> Any:
    name, _ = backend(device)
    if name == "reference":
        return reference
    if name == "cuda":
        return cuda
    cpu.choose(name.removeprefix("cpu:"))
    return cpu


@torch.library.custom_op("otaro::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Activations [tokens, length] times packed rows, plus a bias [rows]: [tokens, rows], in the type of the
    activations.

    Up to `FEW_TOKENS` tokens the product is that of `reference.linear`, to the last bit; more are multiplied
    with decoded weights by the matrix product of the device's library, unless a backend has a faster way
    (`cuda.matmul`).
    """
    packed = _checked(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_activations(x, base, length, bias)
    serving = _serving(x.device)
    result: torch.Tensor
    if len(x) > FEW_TOKENS:
        result = serving.matmul(x.detach().contiguous(), packed, bias)
        return result
    result = serving.linear(x.detach().contiguous(), packed)
    return (result if bias is None else result + bias.detach()).to(x.dtype)


@linear.register_fake
def _(
    x: torch.Tensor,
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_packed(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_activations(x, base, length, bias)
    return x.new_empty(x.shape[0], base.shape[0])


@torch.library.custom_op("otaro::decode", mutates_args=())
def decode(
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The values [rows, length] of packed rows."""
    packed = _checked(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_dtype(dtype)
    result: torch.Tensor = _serving(base.device).decode(packed, dtype)
    return result


@decode.register_fake
def _(
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_packed(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_dtype(dtype)
    return base.new_empty(base.shape[0], length, dtype=dtype)


@torch.library.custom_op("otaro::embedding", mutates_args=())
def embedding(
    ids: torch.Tensor,
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The values [ids, length] of the packed rows with the numbers `ids`."""
    packed = _checked(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_dtype(dtype)
    _check_ids(ids, base)
    # A GPU would have to be waited for, which a graph that is being captured cannot: there, rows that do not
    # exist are NaN.
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(base):
        raise KernelError(
            f"ids run from {int(ids.min())} to {int(ids.max())}, but there are {len(base)} rows"
        )
    result: torch.Tensor = _serving(base.device).embedding(ids.long().contiguous(), packed, dtype)
    return result


@embedding.register_fake
def _(
    ids: torch.Tensor,
    base: torch.Tensor,
    scales: torch.Tensor,
    planes: Sequence[torch.Tensor],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_packed(Packed(base, scales, planes, length, group_size, truncate, scale_exponent))
    _check_dtype(dtype)
    _check_ids(ids, base)
    return base.new_empty(ids.shape[0], length, dtype=dtype)


@torch.library.custom_op("otaro::quantize", mutates_args=())
def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [tokens, length] as int16, and the power of two of each unit [tokens, units], float32."""
    _check_quantize(x, group_size)
    codes, scales = _serving(x.device).quantize(x.detach().contiguous(), group_size)
    return codes, scales


@quantize.register_fake
def _(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    _check_quantize(x, group_size)
    units = -(-x.shape[1] // reference.unit_size(group_size))
    return x.new_empty(x.shape, dtype=torch.int16), x.new_empty(x.shape[0], units, dtype=torch.float32)


def _checked(packed: Packed) -> Packed:
    """The same, known to be sound, in contiguous memory."""
    _check_packed(packed)
    planes = [plane.contiguous() for plane in packed.planes]
    return packed._replace(base=packed.base.contiguous(), scales=packed.scales.contiguous(), planes=planes)


def _check_packed(packed: Packed) -> None:
    base, scales, planes, length, group_size, _, scale_exponent = packed
    if length < 1 or length >= 2**31:
        raise KernelError(f"a row cannot have {length} weights")
    if group_size < 1 or group_size % BLOCK or group_size >= 2**31:
        raise KernelError(f"group_size is {group_size}, and must be a positive multiple of {BLOCK}")
    # with others, products would not be exact
    if not MIN_SCALE_EXPONENT <= scale_exponent <= MAX_SCALE_EXPONENT:
        between = f"from {MIN_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}"
        raise KernelError(f"scale_exponent is {scale_exponent}, and must be {between}")
    if len(planes) > len(PLANES):
        raise KernelError(f"{len(planes)} planes were given, and there are {len(PLANES)} at most")
    _check("base", base, torch.uint8, (None, BASE_BYTES * blocks(length)), base)
    rows = base.shape[0]
    _check("scales", scales, torch.uint8, (rows, -(-length // group_size)), base)
    for number, plane in zip(PLANES, planes, strict=False):
        _check(f"plane {number}", plane, torch.uint8, (rows, PLANE_BYTES * blocks(length)), base)


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, int], like: torch.Tensor
) -> None:
    wrong = tensor.dim() != 2 or any(
        want not in (None, have) for have, want in zip(tensor.shape, shape, strict=True)
    )
    if wrong or tensor.dtype != dtype:
        wanted = ", ".join("rows" if size is None else str(size) for size in shape)
        raise KernelError(f"{name} must be {dtype} [{wanted}], not {tensor.dtype} {list(tensor.shape)}")
    if tensor.device != like.device:
        raise KernelError(f"{name} is on {tensor.device}, the packed weight on {like.device}")
    _check_strided(name, tensor)


def _check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise KernelError(f"{name} must be an ordinary tensor, not {tensor.layout}; call .to_dense() first")


def _check_activations(x: torch.Tensor, base: torch.Tensor, length: int, bias: torch.Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != length or x.dtype not in _FLOATS:
        raise KernelError(
            f"activations must be float32, float16 or bfloat16 [tokens, {length}], not "
            f"{x.dtype} {list(x.shape)}"
        )
    if x.device != base.device:
        raise KernelError(f"activations are on {x.device}, the packed weight on {base.device}")
    _check_strided("activations", x)
    if bias is None:
        return
    _check_strided("the bias", bias)
    if bias.shape != base.shape[:1] or bias.dtype != x.dtype or bias.device != x.device:
        like = f"{x.dtype} [{base.shape[0]}] on {x.device}"
        raise KernelError(f"the bias must be {like}, not {bias.dtype} {list(bias.shape)} on {bias.device}")


def _check_quantize(x: torch.Tensor, group_size: int) -> None:
    if x.dim() != 2 or x.shape[1] < 1 or x.dtype not in _FLOATS:
        raise KernelError(
            "activations must be float32, float16 or bfloat16 [tokens, length], not "
            f"{x.dtype} {list(x.shape)}"
        )
    _check_strided("activations", x)
    if group_size < 1 or group_size % BLOCK or group_size >= 2**31:
        raise KernelError(f"group_size is {group_size}, and must be a positive multiple of {BLOCK}")


def _check_ids(ids: torch.Tensor, base: torch.Tensor) -> None:
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise KernelError(f"ids must be int64 or int32 [count], not {ids.dtype} {list(ids.shape)}")
    if ids.device != base.device:
        raise KernelError(f"ids are on {ids.device}, the packed weight on {base.device}")
    _check_strided("ids", ids)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise KernelError(f"weights decode to float32, float16 or bfloat16, not {dtype}")
