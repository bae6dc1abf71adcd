"""What vLLM asks a quantization method: which layers it is for, what they hold, what they compute."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from otaro.errors import FormatError, OtaroError
from otaro.file.io import NestedDirectory
from otaro.kernels import nvrtc
from otaro.sefp.precision import Precision
from otaro.vllm.shares import PackedShare, Shares, dealt

METHOD = "sefp"
PRECISION = "OTARO_PRECISION"  # environment variable
_ORDER = {"q": 0, "k": 1, "v": 2}


class SefpConfig(QuantizationConfig):
    """The `quantization_config` of a nested model, and the precision it is opened at; None is the finest."""

    def __init__(self) -> None:
        super().__init__()
        self.precision: Precision | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SefpConfig:
        """Group size and reconstruction are read from the shards, which state them."""
        return cls()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Take the precision from `--hf-overrides`, or else from the environment; missing planes are refused
        at once.

        It is noted in the model's configuration, by which vLLM tells compiled models in its cache apart.
        """
        asked = getattr(hf_config, METHOD, None) or {}
        if not isinstance(asked, dict) or asked.keys() - {"precision"}:
            raise OtaroError(
                f"""--hf-overrides: {METHOD} is {asked!r}, and must look like {{"precision": "E5M4"}}"""
            )
        chosen = asked.get("precision") or os.environ.get(PRECISION)
        self.precision = Precision(chosen) if chosen else None
        if Path(model_name).is_dir():  # on the Hub, it is known when it is fetched
            nested = NestedDirectory(model_name)
            self.precision = self.precision or nested.finest
            nested.require(self.precision)
        setattr(hf_config, METHOD, {"precision": str(self.precision) if self.precision else None})

    def get_name(self) -> str:
        """As `--quantization` says it."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those that the operations take."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest compute capability of an NVIDIA GPU that has our kernels."""
        major, minor = nvrtc.OLDEST
        return 10 * major + minor

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says it."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for everything that is packed; attention keeps its own."""
        if isinstance(layer, RoutedExperts):
            raise OtaroError(f"{prefix}: mixtures of experts are not served through vLLM; use otaro serve")
        return SefpMethod() if isinstance(layer, LinearBase | VocabParallelEmbedding) else None


class SefpMethod(QuantizeMethodBase):
    """Linear layers, the vocabulary and the head on packed planes, never decoded as a whole."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """A parameter without elements: it tells vLLM where weights go, and us which comes where."""
        layer.sefp = Shares(layer.prefix, output_partition_sizes, sum(output_partition_sizes), params_dtype)
        layer.inputs_each = input_size_per_partition
        layer.weight = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
        layer.weight.weight_loader = partial(_take, layer)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """The head reads what the embedding holds."""
        layer.weight, layer.sefp = embed_tokens.weight, embed_tokens.sefp
        return layer

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product, straight from the planes."""
        product: torch.Tensor = layer.sefp.linear(x, bias)
        return product

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Rows of the vocabulary."""
        rows: torch.Tensor = layer.sefp.embedding(input_)
        return rows


def stand_in(nested: NestedDirectory, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape of a packed one, on no device: whoever tries to copy it is told by torch."""
    made = torch.empty(nested.schema.packed[name], dtype=dtype, device="meta")
    made.sefp = (nested, name)  # type: ignore[attr-defined]
    return made


def _take(layer: Any, weight: torch.Tensor, loaded: torch.Tensor, shard: Any = None) -> None:
    """Called when vLLM's renaming has found the layer of a packed tensor: note which part of it is ours."""
    source = getattr(loaded, "sefp", None)
    if source is None:
        raise FormatError(
            f"{layer.prefix}: its weight is not packed as vLLM wants it (a model that otaro serve may still "
            "run), "
            "or a --load-format was asked for: nested directories need the default"
        )
    nested, name = source
    sizes = _sizes(layer)
    whole = shard is None and len(sizes) > 1  # fused in the file as it is here
    index = _ORDER.get(shard) if isinstance(shard, str) else shard or 0
    if not isinstance(index, int):
        raise FormatError(
            f"{name}: vLLM puts it into the parts {shard} of {layer.prefix}, which is not supported"
        )
    expected = (sum(sizes) if whole else sizes[index], layer.input_size)
    if nested.schema.packed[name] != expected:
        raise FormatError(
            f"{name} is {list(nested.schema.packed[name])}, but vLLM's {layer.prefix} has {list(expected)}"
        )
    inputs = dealt(layer.input_size, layer.inputs_each, layer.tp_rank, layer.tp_size)
    for part in range(len(sizes)) if whole else [index]:
        before = sum(sizes[:part]) if whole else 0
        rows = _rows(layer, sizes[part], layer.sefp.sizes[part])
        layer.sefp.take(
            part, PackedShare(nested, name, slice(before + rows.start, before + rows.stop), inputs)
        )


def _sizes(layer: Any) -> list[int]:
    """Rows of a layer's matrices, over all processes."""
    if isinstance(layer, VocabParallelEmbedding):
        return [layer.org_vocab_size]
    if isinstance(layer, QKVParallelLinear):  # its own list counts a head once for each process that has it
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        return [heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", None) or [layer.output_size])


def _rows(layer: Any, size: int, each: int) -> slice:
    if not isinstance(layer, VocabParallelEmbedding):
        return dealt(size, each, layer.tp_rank, layer.tp_size)
    indices = layer.shard_indices  # the vocabulary is filled up before it is dealt out
    rows = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
    if layer.num_added_embeddings or rows.start == rows.stop:
        what = (
            "added rows" if layer.num_added_embeddings else f"fewer rows than {layer.tp_size} processes need"
        )
        raise OtaroError(f"{layer.prefix} has {what}, which packed vocabularies do not take")
    return rows


def register() -> None:
    """Tell vLLM."""
    register_quantization_config(METHOD)(SefpConfig)
