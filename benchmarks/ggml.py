"""ggml's matrix product, called through the shared libraries that llama-cpp-python brings along.

`Products` holds copies of one quantized matrix and multiplies them in turn by the same tokens. With `repacked` the copies lie
as llama.cpp lays them out for this CPU when it loads a model, which ggml knows for some types; plain ones lie as in the file.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12}
_HEADROOM = 1 << 20  # bytes for the descriptions of tensors and graphs, not for their data


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def library() -> Any | None:
    """The functions of ggml, or None where llama-cpp-python is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    base, cpu = (ctypes.CDLL(str(folder / f"libggml{part}.so"), mode=ctypes.RTLD_GLOBAL) for part in ("-base", "-cpu"))
    p, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t

    class Ggml:
        pass

    def declare(lib: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(lib, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(Ggml, name, staticmethod(function))

    declare(base, "log_set", None, p, p)
    declare(base, "init", p, _InitParams)
    declare(base, "free", None, p)
    declare(base, "tensor_overhead", size)
    declare(base, "graph_overhead", size)
    declare(base, "new_tensor_2d", p, p, ctypes.c_int, i64, i64)
    declare(base, "mul_mat", p, p, p, p)
    declare(base, "new_graph", p, p)
    declare(base, "build_forward_expand", None, p, p)
    declare(base, "nbytes", size, p)
    declare(base, "quantize_chunk", size, ctypes.c_int, p, p, i64, i64, i64, p)
    declare(base, "row_size", size, ctypes.c_int, i64)
    declare(base, "backend_alloc_ctx_tensors_from_buft", p, p, p)
    declare(base, "backend_buffer_free", None, p)
    declare(base, "backend_free", None, p)
    declare(base, "backend_tensor_set", None, p, p, size, size)
    declare(base, "backend_tensor_get", None, p, p, size, size)
    declare(base, "backend_graph_compute", ctypes.c_int, p, p)
    declare(base, "backend_get_default_buffer_type", p, p)
    declare(base, "backend_reg_dev_get", p, p, size)
    declare(base, "backend_reg_get_proc_address", p, p, ctypes.c_char_p)
    declare(base, "backend_dev_supports_op", ctypes.c_bool, p, p)
    declare(cpu, "backend_cpu_init", p)
    declare(cpu, "backend_cpu_reg", p)
    declare(cpu, "backend_cpu_set_n_threads", None, p, ctypes.c_int)
    Ggml.log_set(_SILENCE, None)  # type: ignore[attr-defined]
    return Ggml


def quantized(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """The bytes of a float32 matrix in one of the TYPES."""
    ggml = library()
    assert ggml is not None
    rows, length = weight.shape
    data = np.empty(rows * ggml.row_size(TYPES[kind], length), np.uint8)
    ggml.quantize_chunk(TYPES[kind], weight.ctypes.data, data.ctypes.data, 0, rows, length, None)
    return data


class Products:
    """Copies of a matrix [rows, length], to be multiplied by the tokens x [tokens, length]."""

    def __init__(
        self,
        data: np.ndarray[Any, Any],
        kind: str,
        rows: int,
        x: np.ndarray[Any, Any],
        copies: int,
        threads: int,
        repacked: bool,
    ) -> None:
        ggml = library()
        assert ggml is not None
        self._ggml, self._rows, self._tokens = ggml, rows, len(x)
        self._backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self._backend, threads)
        plain = ggml.backend_get_default_buffer_type(self._backend)
        room = _HEADROOM + copies * (2 * ggml.tensor_overhead() + ggml.graph_overhead())
        self._contexts = [ggml.init(_InitParams(room, None, True)) for _ in range(2)]
        matrices, others = self._contexts
        weights = [ggml.new_tensor_2d(matrices, TYPES[kind], x.shape[1], rows) for _ in range(copies)]
        tokens = ggml.new_tensor_2d(others, TYPES["F32"], x.shape[1], len(x))
        self._products = [ggml.mul_mat(others, weight, tokens) for weight in weights]
        layout = _repacking(ggml) if repacked else plain
        self._buffers = [ggml.backend_alloc_ctx_tensors_from_buft(matrices, layout)] if layout else []
        self._buffers.append(ggml.backend_alloc_ctx_tensors_from_buft(others, plain))
        device = ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0)
        self.supported = bool(layout) and ggml.backend_dev_supports_op(device, self._products[0])
        if not self.supported:
            return
        for weight in weights:
            ggml.backend_tensor_set(weight, data.ctypes.data, 0, data.nbytes)
        ggml.backend_tensor_set(tokens, x.ctypes.data, 0, x.nbytes)
        self._graphs = [ggml.new_graph(others) for _ in weights]
        for graph, product in zip(self._graphs, self._products, strict=True):
            ggml.build_forward_expand(graph, product)

    def run(self) -> None:
        """Multiply each copy."""
        for graph in self._graphs:
            self._ggml.backend_graph_compute(self._backend, graph)

    def result(self) -> np.ndarray[Any, Any]:
        """The last product [tokens, rows]."""
        out = np.empty((self._tokens, self._rows), np.float32)
        self._ggml.backend_tensor_get(self._products[-1], out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self._buffers:
            self._ggml.backend_buffer_free(buffer)
        for context in self._contexts:
            self._ggml.free(context)
        self._ggml.backend_free(self._backend)


def _repacking(ggml: Any) -> int | None:
    """The kind of buffer whose tensors are laid out for this CPU; None where ggml was built without."""
    registry = ggml.backend_cpu_reg()
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    kinds = listed(ggml.backend_reg_dev_get(registry, 0))
    return kinds[0] if kinds else None
