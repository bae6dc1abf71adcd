"""llama.cpp as an engine to compare with, on GGUF files made of the same weights.

The files hold a nested model's weights at its finest precision, quantized by gguf's own functions: matrices,
embedding and head all in one type (what llama.cpp calls `--pure`), since ours follow the precision all the way too;
norms and biases in float32. Without a tokenizer there is no vocabulary: tokens go in as numbers. llama.cpp runs as
it comes, with mapped files, a float16 KV cache, its own choice of flash attention and of repacking weights for this
CPU; only the number of threads is given.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otaro.errors import OtaroError, install
from otaro.evaluate.engines import Engine, plain_weights
from otaro.file.atomic import explained
from otaro.runtime.precision import attachment

KINDS = {"E5M8": "F16", "E5M7": "Q8_0", "E5M4": "Q5_0", "E5M3": "Q4_0"}
"""The type of GGUF with the same number of bits as a precision, give or take its scales; for the finest, plain float16."""

# model_type of transformers -> architecture of GGUF. Those of `llama` turn neighbouring values of a head by one angle, where
# transformers turns values half a head apart: the rows of queries and keys are put into that order.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_REORDERED = ("llama",)


def write_gguf(model: Any, kind: str, path: Path, tokenizer: Any = None) -> None:
    """Write the weights of a nested model as a GGUF file of type F16, Q8_0, Q5_0 or Q4_0, with a tokenizer of SmolLM's kind."""
    gguf = _needed("gguf", "gguf")
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(_ARCHITECTURES)
        raise OtaroError(f"models of type {config.model_type} cannot be written for llama.cpp here; {known} can")
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for key, value in _metadata(config).items():
        getattr(writer, f"add_{key}")(value)
    vocabulary = {"tokenizer_model": "none"} if tokenizer is None else _vocabulary(tokenizer)
    for key, value in vocabulary.items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    for name, tensor in plain_weights(model):
        values = _reordered(name, tensor, config) if architecture in _REORDERED else tensor
        if tensor.ndim > 1 and tensor.shape[-1] % block:
            raise OtaroError(f"{name} has rows of {tensor.shape[-1]} weights; {kind} needs a multiple of {block}")
        its_kind = wanted if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), its_kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=its_kind)
    if (factors := _frequency_factors(model)) is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def gguf_path(model: Any, kind: str, folder: Path) -> Path:
    """Where the GGUF file of a model goes: its name is the model's identity, so it is never taken for other weights."""
    nested = attachment(model).nested
    return folder / f"{nested.base.header.model[:16]}-{nested.finest}-{kind}.gguf"


def _metadata(config: Any) -> dict[str, Any]:
    """What llama.cpp must know of the architecture, by gguf's names."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": _head_size(config),
        "value_length": _head_size(config),
        "rope_dimension_count": _head_size(config),
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }


def _vocabulary(tokenizer: Any) -> dict[str, Any]:
    """A byte-level BPE as llama.cpp reads it, split into words as SmolLM's is."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")
    if merges is None:
        raise OtaroError("only byte-level BPE vocabularies can be written for llama.cpp here")
    special = set(tokenizer.all_special_ids)
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokenizer.convert_ids_to_tokens(range(len(tokenizer))),
        "token_types": [3 if token in special else 1 for token in range(len(tokenizer))],  # control, normal
        "token_merges": [one if isinstance(one, str) else " ".join(one) for one in merges],
        "eos_token_id": tokenizer.eos_token_id,
        "add_bos_token": False,
    }


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _reordered(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of queries and keys with the two halves of each head interleaved; other tensors as they are."""
    heads: Mapping[str, int] = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if projection not in heads:
        return tensor
    halves: torch.Tensor = tensor.unflatten(0, (heads[projection], 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _frequency_factors(model: Any) -> torch.Tensor | None:
    """What the plain frequencies of rotary embeddings are divided by; None where they are plain."""
    config, rotary = model.config, model.model.rotary_emb
    if rotary.attention_scaling != 1:
        raise OtaroError(
            f"rotary embeddings of type {config.rope_parameters['rope_type']} cannot be written for llama.cpp here"
        )
    size = _head_size(config)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    factors = plain / rotary.inv_freq.float()
    return None if torch.allclose(factors, torch.ones_like(factors)) else factors


class LlamaCpp(Engine):
    """A GGUF file, run by llama.cpp on `threads` threads with room for `positions` tokens of each sequence."""

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
        found: np.ndarray[Any, Any] = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, number), (count,))
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
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
                batch.logits[i] = i >= count - wanted
            if status := self._lib.llama_decode(self._context, batch):
                raise OtaroError(f"llama.cpp stopped with status {status}")
            return [int(self._logits(i).argmax()) for i in range(count - wanted, count)]
        finally:
            self._lib.llama_batch_free(batch)


@cache
def library() -> Any:
    """llama-cpp-python's low-level functions, kept from talking."""
    lib = _needed("llama_cpp", "llama-cpp-python")
    lib.silence = lib.llama_log_callback(lambda level, text, data: None)  # llama.cpp holds no reference, so the module does
    lib.llama_log_set(lib.silence, None)
    lib.llama_backend_init()
    return lib


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OtaroError(
            f"the comparison with llama.cpp needs {package} ({error}); {install('llama')} brings it "
            "and compiles llama.cpp for this CPU, which takes a C++ compiler and some minutes"
        ) from None
