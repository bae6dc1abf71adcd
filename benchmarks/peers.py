"""Kernels of other nested formats, built from checkouts of theirs, behind one form: `Peer`.

AnyBCQ's repository (its own kernel, and Any-Precision's) and MatGPTQ's are compiled as they are, by nvcc
alone: what they ask of torch's headers is a handful of names, `_HEADERS`. Their functions are then called
with addresses, on torch's current stream. Nothing of theirs is in this repository. A library is kept under
the digest of all that it was made of.

Weights are random bits of the right size and shape, for time alone; that a kernel computes what it should is
asked of a small matrix, against its own decoder, or against what its format says.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GROUP = 128  # weights that share a scale in AnyBCQ and MatGPTQ
CHECKED = (256, 4096)  # rows and length of a matrix that is checked
TOLERANCE = 0.02  # of a product: some of them sum in float16
_BCQ_BITS = 4  # planes that AnyBCQ's files have
_HEADERS = {
    "ATen/ATen.h": """#pragma once
namespace at {
enum class ScalarType { Float, Half, BFloat16 };
constexpr ScalarType kFloat = ScalarType::Float, kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
struct Half;
struct BFloat16;
}
""",
    "ATen/cuda/CUDAContext.h": "",
    "c10/cuda/CUDAGuard.h": "",
    "torch/extension.h": "",
}
_ANYBCQ = """#include "anyprec.h"
#include "anybcq.h"
using Half = __half;
using Stream = cudaStream_t;
extern "C" void any_precision(Half* x, Half* out, uint32_t* planes, Half* table, int tokens, int rows,
                              int length, int bits, Stream stream) {
  anyprec_matmul(x, out, planes, table, tokens, rows, length, bits, stream);
}
extern "C" void any_precision_decode(uint32_t* planes, Half* table, Half* out, int rows, int length, int bits,
                                     Stream stream) {
  anyprec_dequant_kbit(planes, rows, length, table, out, bits, stream);
}
extern "C" void any_bcq(uint32_t* planes, Half* scales, Half* offsets, Half* x, Half* out, int rows,
                        int length, int bits, int planes_there, int group, Stream stream) {
  cudaMemsetAsync(out, 0, sizeof(Half) * rows, stream);  // it adds to what is there
  nqmv_bias<<<dim3((rows + 1023) / 1024, (length + 63) / 64), 256, 0, stream>>>(
    planes, scales, offsets, x, out, rows, length, bits, planes_there, group);
}
extern "C" void any_bcq_decode(uint32_t* planes, Half* scales, Half* offsets, Half* out, int rows, int length,
                               int bits, int planes_there, int group, Stream stream) {
  dequantize_t<<<dim3(length / 4, rows / 64), dim3(4, 16), 0, stream>>>(
    planes, scales, offsets, out, rows, length, bits, planes_there, group);
}
"""
_MATGPTQ = """#include <vector>
#include "gemm.h"
#include "utils.h"
using namespace MATGPTQ_CUDA;
extern "C" void matgptq(uint32_t* weights, __half* scales, __half* x, __half* out, int rows, int length,
                        int tokens, int bits, int group, cudaStream_t stream) {
  Features features{};
  features.flags.is_async = 1;
  matmul_matgptq_host(bits, group, rows, length, tokens, weights, scales, x, out, stream, features);
}
extern "C" void matgptq_pack(const u8* codes, u32* out, int rows, int length, int bits) {
  const size_t size = static_cast<size_t>(rows) * length / 32;
  std::vector<u8> moved(32 * size);
  std::vector<u64> first(size), fourth(size), fifth(size);
  std::vector<u32> second(size), third(size);
  swizzle_weights(bits, rows, length, codes, moved.data(), false);
  split_up_n_bits(bits, rows, length, moved.data(), first.data(), second.data(), third.data(), fourth.data(),
                  fifth.data());
  swizzle_matgptq(bits, size, first.data(), second.data(), third.data(), fourth.data(), fifth.data(), out,
                  out + size, out + 2 * size, out + 3 * size, out + 4 * size, out + 5 * size, out + 6 * size,
                  out + 7 * size);
}
"""


Multiply = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None]


@dataclass
class Peer:
    """A kernel at one precision."""

    name: str
    tokens: tuple[int, ...]
    """Which numbers of them it takes."""
    weights: Callable[[int, int], list[torch.Tensor]]
    """Random ones, of so many rows of so many weights."""
    multiply: Multiply
    """Of weights and float16 [tokens, length] into float16 [tokens, rows]."""
    check: Callable[[], float]
    """The relative error of a small product."""


def anybcq(checkout: Path, folder: Path, arch: str) -> Iterator[Peer]:
    """Any-Precision at 3, 4 and 8 bits, AnyBCQ at 3 and 4."""
    source = checkout / "anybcq" / "inference" / "custom_kernel"
    files = [source / "anyprec.cu", source / "anybcq.cu"]
    library = _library("anybcq", _ANYBCQ, files, [source], folder, arch, "-std=c++17")
    for bits in (3, 4, 8):
        yield _any_precision(library, bits)
    for bits in (3, _BCQ_BITS):
        yield _any_bcq(library, bits)


def _any_precision(library: Any, bits: int) -> Peer:
    def weights(rows: int, length: int) -> list[torch.Tensor]:
        return [_bits(bits, rows, length // 32), torch.randn(rows, 1 << bits, device="cuda").half()]

    def multiply(made: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
        _call(library.any_precision, x, out, *made, *x.shape[:1], out.shape[1], x.shape[1], bits)

    def check() -> float:
        made, decoded = weights(*CHECKED), torch.empty(CHECKED, dtype=torch.float16, device="cuda")
        _call(library.any_precision_decode, *made, decoded, *CHECKED, bits)
        return max(_error(multiply, made, decoded, tokens) for tokens in (1, 8))

    return Peer(f"Any-Precision {bits} bits", (1, 2, 4, 8), weights, multiply, check)


def _any_bcq(library: Any, bits: int) -> Peer:
    def weights(rows: int, length: int) -> list[torch.Tensor]:
        groups = length // GROUP
        scales = torch.rand(groups, bits, rows, device="cuda").half()
        offsets = torch.randn(groups, rows, device="cuda").half()
        return [_bits(length // 32, _BCQ_BITS, rows), scales, offsets]

    def multiply(made: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
        _call(library.any_bcq, *made, x, out, out.shape[1], x.shape[1], bits, _BCQ_BITS, GROUP)

    def check() -> float:
        made, decoded = weights(*CHECKED), torch.empty(CHECKED[::-1], dtype=torch.float16, device="cuda")
        _call(library.any_bcq_decode, *made, decoded, *CHECKED, bits, _BCQ_BITS, GROUP)
        return _error(multiply, made, decoded.t(), 1)

    return Peer(f"AnyBCQ {bits} bits", (1,), weights, multiply, check)


def matgptq(checkout: Path, folder: Path, arch: str) -> Iterator[Peer]:
    """At 3, 4 and 8 bits."""
    source = checkout / "inference_lib" / "matgptq_cuda" / "csrc"
    flags = f"-std=c++20 --expt-relaxed-constexpr --use_fast_math -DNDEBUG -DTARGET_CUDA_ARCH={arch}".split()
    files = [source / "matgptq_gemm.cu", source / "utils.cpp"]
    library = _library("matgptq", _MATGPTQ, files, [source, source / "include"], folder, arch, *flags)
    for bits in (3, 4, 8):
        yield _matgptq(library, bits)


def _matgptq(library: Any, bits: int) -> Peer:
    def weights(rows: int, length: int) -> list[torch.Tensor]:
        return [_bits(bits, rows, length // 32), torch.rand(rows, length // GROUP, device="cuda").half()]

    def multiply(made: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
        _call(library.matgptq, *made, x, out, out.shape[1], x.shape[1], x.shape[0], bits, GROUP)

    def check() -> float:
        (rows, length), groups = CHECKED, CHECKED[1] // GROUP
        codes = torch.randint(1 << bits, CHECKED, dtype=torch.uint8)
        packed = torch.zeros(bits, rows, length // 32, dtype=torch.int32)
        addresses = (ctypes.c_void_p(one.data_ptr()) for one in (codes, packed))
        library.matgptq_pack(*addresses, rows, length, bits)
        scales = torch.rand(rows, groups).half() / (1 << 8)
        values = (codes.unflatten(1, (groups, GROUP)).float() - (1 << (bits - 1))) * scales.float()[..., None]
        # as it wants them: of sixteen rows, group by group
        moved = scales.view(-1, 16, groups).transpose(1, 2).contiguous()
        decoded = (values.flatten(1) * (1 << (8 - bits))).cuda()
        return max(_error(multiply, [packed.cuda(), moved.cuda()], decoded, tokens) for tokens in (1, 8, 16))

    return Peer(f"MatGPTQ {bits} bits", (1, 2, 4, 8, 16), weights, multiply, check)


def marlin() -> Peer:
    """At 4 bits with float16 scales for 128, of vLLM 0.32; `ImportError` says why there is none."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    if not hasattr(torch.ops._C, "marlin_gemm"):
        raise ImportError("the installed vLLM is built without Marlin's kernels")
    workspace = marlin_utils.marlin_make_workspace_new(torch.device("cuda"))

    def made_of(codes: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
        """Codes 0 to 15 [length, rows] eight to a word, scales [groups, rows]."""
        length, rows = codes.shape
        words = sum(codes.view(length // 8, 8, rows)[:, i].int() << 4 * i for i in range(8))
        permuted = marlin_utils.marlin_permute_scales(scales, length, rows, GROUP)
        return [ops.gptq_marlin_repack(words, length, rows, 4), permuted]

    def weights(rows: int, length: int) -> list[torch.Tensor]:
        codes = torch.randint(16, (length, rows), device="cuda")
        return made_of(codes, torch.rand(length // GROUP, rows, device="cuda").half())

    def multiply(made: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
        ops.marlin_gemm(
            x, out, made[0], None, made[1], None, None, None, workspace, scalar_types.uint4b8,
            len(x), out.shape[1], x.shape[1], use_fp32_reduce=True,
        )  # fmt: skip

    def check() -> float:
        rows, length = CHECKED
        codes = torch.randint(16, (length, rows), device="cuda")
        scales = torch.rand(length // GROUP, rows, device="cuda").half()
        decoded = (codes.float() - 8) * scales.float().repeat_interleave(GROUP, 0)
        return max(_error(multiply, made_of(codes, scales), decoded.t(), tokens) for tokens in (1, 16))

    return Peer("Marlin 4 bits", (1, 2, 4, 8, 16), weights, multiply, check)


def _bits(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device="cuda")


def _call(function: Any, *given: Any) -> None:
    """With addresses of tensors, and torch's current stream."""
    arguments = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, torch.Tensor) else one for one in given]
    function(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def _error(multiply: Multiply, made: list[torch.Tensor], decoded: torch.Tensor, tokens: int) -> float:
    """Relative, of all numbers together; infinite where one was not written."""
    x = torch.randn(tokens, decoded.shape[1], device="cuda").half() / decoded.shape[1]
    out = torch.full((tokens, len(decoded)), torch.nan, dtype=torch.float16, device="cuda")
    multiply(made, x, out)
    exact = x.double() @ decoded.double().t()
    off = float((out - exact).norm() / exact.norm())
    return off if off == off else float("inf")


def _library(
    name: str, wrapper: str, sources: list[Path], includes: list[Path], folder: Path, arch: str, *flags: str
) -> Any:
    """Compiled, unless it was before."""
    if missing := [str(one) for one in sources if not one.is_file()]:
        sys.exit(f"--{name}: there is no {missing[0]}; give the folder of a checkout")
    headers = [header for include in includes for header in sorted(include.glob("*.*h"))]
    parts = [one.read_bytes() for one in (*sources, *headers)]
    parts += [one.encode() for one in (*_HEADERS.values(), wrapper, arch, *flags)]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    made = folder / f"{name}-{digest}"
    path = made.with_suffix(".so")
    if not path.exists():
        for header, text in _HEADERS.items():
            (made / header).parent.mkdir(parents=True, exist_ok=True)
            (made / header).write_text(text)
        (made / "wrapper.cu").write_text(wrapper)
        print(f"building {name}, half a minute", flush=True)
        command = [
            _nvcc(), "-shared", "-O3", "-Xcompiler", "-fPIC,-w", "-w", "--threads", "0",
            f"-gencode=arch=compute_{arch},code=sm_{arch}", *flags, f"-I{made}",
            *(f"-I{one}" for one in includes), *map(str, sources), str(made / "wrapper.cu"),
            "-o", str(made / "made.so"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"--{name}: it could not be built:\n{done.stderr[-4000:]}")
        (made / "made.so").replace(path)
    return ctypes.CDLL(str(path))


def _nvcc() -> str:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(toolkit))
    return found or sys.exit("there is no nvcc to build them: install the CUDA toolkit, or set CUDA_HOME")
