"""llama.cpp as an engine to compare with, on GGUF files made of the same weights.

The files are those of `otaro export`, at the model's finest precision: matrices, embedding and head all in
one type (what llama.cpp calls `--pure`), since ours follow the precision all the way too; norms and biases in
float32. llama.cpp runs as it comes, with mapped files, a float16 KV cache, its own choice of flash attention
and of repacking weights for this CPU; only the number of threads is given.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otaro.errors import OtaroError, install
from otaro.evaluate.engines import Engine
from otaro.export.run import export
from otaro.file.io import NestedDirectory

KINDS = {"E5M8": "F16", "E5M7": "Q8_0", "E5M4": "Q5_0", "E5M3": "Q4_0"}
"""The type of GGUF with as many bits as a precision, but for its scales; for the finest plain float16."""


def gguf_file(nested: NestedDirectory, kind: str, folder: Path) -> Path:
    """The weights, written into a folder as a GGUF file of type F16, Q8_0, Q5_0 or Q4_0."""
    path = folder / f"{kind}.gguf"
    report = export(nested.path, path, precision=nested.finest, to="gguf", type=kind)
    if report.types.keys() - {kind, "F32"}:  # export takes float16 there, which would be another contender
        path.unlink()
        rows = "rows of a multiple of 32 weights, and this model has others"
        raise OtaroError(f"{kind} needs {rows}; leave llama.cpp out")
    return path


class LlamaCpp(Engine):
    """A GGUF file, run by llama.cpp on `threads` threads, with `positions` tokens for each sequence."""

    def __init__(self, path: Path, *, threads: int, positions: int, sequences: int = 1) -> None:
        self._lib = library()
        settings = self._lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise OtaroError(f"llama.cpp cannot open {path}")
        options = self._lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = positions * sequences, sequences
        options.n_threads = options.n_threads_batch = threads
        self._context = self._lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise OtaroError(f"llama.cpp has no room for {positions} tokens of {path}")
        self._memory = self._lib.llama_get_memory(self._context)

    def feed(self, ids: list[int]) -> None:
        """Read tokens."""
        tokens = (self._lib.llama_token * len(ids))(*ids)
        if status := self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise OtaroError(f"llama.cpp stopped with status {status}")
        self._lib.llama_synchronize(self._context)

    def keep(self, length: int) -> None:
        """Forget later tokens."""
        self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)

    def logits(self) -> torch.Tensor:
        """What follows the last token."""
        return torch.from_numpy(self._logits(-1).copy())

    def _logits(self, number: int) -> np.ndarray[Any, Any]:
        count = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        logits = self._lib.llama_get_logits_ith(self._context, number)
        found: np.ndarray[Any, Any] = np.ctypeslib.as_array(logits, (count,))
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


class LlamaBatch(LlamaCpp):
    """The same, for several sequences in one batch."""

    def read(self, sequence: int, ids: list[int]) -> int:
        """Read a prompt, and nothing before it; returns the likeliest token after it."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, 0, -1)
        return self._step(ids, list(range(len(ids))), [sequence] * len(ids), wanted=1)[-1]

    def go_on(self, tokens: list[int], count: int) -> list[int]:
        """From these tokens of the first sequences, `count` times by the likeliest; returns the last ones."""
        numbers = list(range(len(tokens)))
        ends = [self._lib.llama_memory_seq_pos_max(self._memory, number) + 1 for number in numbers]
        for _ in range(count):
            tokens = self._step(tokens, ends, numbers, wanted=len(tokens))
            ends = [end + 1 for end in ends]
        return tokens

    def _step(self, ids: list[int], positions: list[int], sequences: list[int], wanted: int) -> list[int]:
        """The likeliest token after each of the last `wanted` ones."""
        count = len(ids)
        batch = self._lib.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for i, (token, position, sequence) in enumerate(zip(ids, positions, sequences, strict=True)):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = i >= count - wanted
            if status := self._lib.llama_decode(self._context, batch):
                raise OtaroError(f"llama.cpp stopped with status {status}")
            return [int(self._logits(i).argmax()) for i in range(count - wanted, count)]
        finally:
            self._lib.llama_batch_free(batch)


@cache
def library() -> Any:
    """llama-cpp-python's low-level functions, kept from talking."""
    try:
        lib: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise OtaroError(
            f"the comparison with llama.cpp needs llama-cpp-python ({error}); {install('llama')} brings it "
            "and compiles llama.cpp for this CPU, which takes a C++ compiler and some minutes"
        ) from None
    # llama.cpp holds no reference, so the module does
    lib.silence = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(lib.silence, None)
    lib.llama_backend_init()
    return lib
