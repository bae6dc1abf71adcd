"""The model to be packed: where it lies, which of its tensors are packed, and how to read them a few rows at a time.

What to pack is asked of the model class itself, built on the meta device from the checkpoint's config: every linear weight, the
token embedding, the output head (once, if tied), and the fused expert stacks of mixtures of experts. So any architecture that
transformers knows can be packed; norms, biases, routers and whatever else there is are kept as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from otaro.errors import CheckpointError
from otaro.file.header import DTYPES

BUILTIN = "builtin"

# Files beside the weights that a packed model keeps: tokenizer, chat template, generation defaults, licence.
SIDECARS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip

# How checkpoints name the parts of a fused expert tensor; each list is one convention (Qwen and most others, Mixtral).
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def resolve_model(model: str | os.PathLike[str], patterns: Sequence[str] | None = None) -> Path:
    """The local directory of a model: a directory as it is, `builtin`, or a Hub id, downloaded into the Hub's cache."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model} is a file; give the directory of a Hugging Face model")
    if str(model) == BUILTIN:
        from otaro.builtin import MODEL_DIR

        return MODEL_DIR
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(patterns or ["*.json", "*.safetensors", *SIDECARS])))
    except HFValidationError:
        raise CheckpointError(f"{model} is neither a directory nor a Hub id (owner/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{model} is not a directory, and fetching it from the Hub failed: {reason}") from error


class Checkpoint:
    """A Hugging Face checkpoint in safetensors files, seen under the parameter names of its model class."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoConfig

        self.directory = directory
        if not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face model")
        self._handles = _open_all(directory)
        self._file_of = {key: handle for handle in self._handles for key in handle.keys()}  # noqa: SIM118 (not a dict)
        self.config = AutoConfig.from_pretrained(directory)
        if (quantized := getattr(self.config, "quantization_config", None)) is not None:
            method = dict(quantized).get("quant_method", "unknown")
            raise CheckpointError(
                f"{directory} is already a nested model; use it as it is"
                if method == "sefp"
                else f"{directory} is quantised ({method}); pack the checkpoint it was made from"
            )
        self.shapes, self.packed, self.tied = _describe_model(self.config)
        self._parts = {name: self._find_parts(name, shape) for name, shape in self.shapes.items()}
        self._check_tied()

    @property
    def dtype(self) -> torch.dtype:
        """The type most of the checkpoint is stored in: that of its first packed tensor."""
        return self.stored_dtype(next(iter(self.packed)))

    def stored_dtype(self, name: str) -> torch.dtype:
        """The type `name` is stored in."""
        return DTYPES[self._slice(self._parts[name][0]).get_dtype()]

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that the model class does not have; transformers ignores them too."""
        used = {key for parts in self._parts.values() for key in parts} | set(self.tied)
        return sorted(key for key in self._file_of.keys() - used if not key.endswith("rotary_emb.inv_freq"))

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return torch.cat([self._read(key) for key in self._parts[name]]).reshape(self.shapes[name])

    def rows(self, name: str, count: int) -> Iterator[torch.Tensor]:
        """The tensor as a matrix, leading dimensions flattened, `count` rows at a time."""
        length = self.shapes[name][-1]
        waiting: list[torch.Tensor] = []
        for key in self._parts[name]:
            view = self._slice(key)
            shape = view.get_shape()
            if len(shape) > 2:  # an already fused stack: slice it expert by expert
                pieces: Iterator[torch.Tensor] = (view[i].reshape(-1, length) for i in range(shape[0]))
            else:
                pieces = (view[start : min(start + count, shape[0])] for start in range(0, shape[0], count))
            for piece in pieces:
                waiting.append(piece)
                while sum(map(len, waiting)) >= count:
                    joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                    yield joined[:count]
                    waiting = [joined[count:]]
        if any(map(len, waiting)):
            yield torch.cat(waiting)

    def _slice(self, key: str) -> Any:
        return self._file_of[key].get_slice(key)

    def _read(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[key].get_tensor(key)
        return tensor

    def _find_parts(self, name: str, shape: Sequence[int]) -> list[str]:
        """The checkpoint's tensors that make up a model tensor, in order of rows."""
        for candidate in (name, name.replace(".mlp.", ".block_sparse_moe.")):
            if candidate in self._file_of:
                if tuple(self._slice(candidate).get_shape()) != tuple(shape):
                    found = list(self._slice(candidate).get_shape())
                    raise CheckpointError(f"{candidate} has shape {found}, config.json implies {list(shape)}")
                return [candidate]
            stem, _, last = candidate.rpartition(".")
            for convention in _EXPERT_PARTS.get(last, ()):
                parts = [f"{stem}.{expert}.{part}.weight" for expert in range(shape[0]) for part in convention]
                if parts[0] in self._file_of:
                    return self._check_parts(name, parts, shape)
        raise CheckpointError(f"{self.directory} lacks the tensor {name}, which {self.config.model_type} models need")

    def _check_parts(self, name: str, parts: list[str], shape: Sequence[int]) -> list[str]:
        if missing := [part for part in parts if part not in self._file_of]:
            raise CheckpointError(f"{self.directory} lacks the tensor {missing[0]}, a part of {name}")
        rows = sum(self._slice(part).get_shape()[0] for part in parts)
        widths = {self._slice(part).get_shape()[-1] for part in parts}
        if rows != shape[0] * shape[1] or widths != {shape[2]}:
            raise CheckpointError(f"the parts of {name} do not add up to the shape {list(shape)} that config.json implies")
        return parts

    def _check_tied(self) -> None:
        """A head that is tied in the config must not be stored with other values."""
        for target, source in self.tied.items():
            if target in self._file_of and not torch.equal(self._read(target), self.read(source)):
                raise CheckpointError(
                    f"config.json ties {target} to {source}, but the checkpoint stores different values for the two; "
                    "set tie_word_embeddings to false in config.json to keep both"
                )


def _open_all(directory: Path) -> list[Any]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        files = [single]
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index} is not a safetensors index") from None
        if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise CheckpointError(f"{index} names {odd[0]!r}, which is not a file of the same directory")
        files = [directory / name for name in names]
    else:
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise CheckpointError(
                f"{directory} holds only pickled weights ({pickled[0]}), which can run code when opened and are not read here; "
                "convert them where you trust them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
        raise CheckpointError(f"{directory} holds no model.safetensors and no model.safetensors.index.json")
    handles = []
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{directory} lacks {file.name}, which its index names")
        try:
            # Read, not mapped: mapped pages would stay in the process and make packing look as large as the model.
            handles.append(safe_open(file, framework="pt", backend="pread"))
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
    return handles


def _describe_model(config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, str]]:
    """Of the model class: all tensors with their shapes, those to pack, and {tied tensor: the one that is stored}."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers cannot build a causal language model for {config.model_type!r}: {error}"
        ) from error
    tied = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    packable = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    packable |= {f"{name}.weight" for name, module in model.named_modules() if module is model.get_input_embeddings()}
    for name, module in model.named_modules():
        for stack in _EXPERT_PARTS:
            if isinstance(getattr(module, stack, None), torch.nn.Parameter):
                if getattr(module, "is_transposed", False):
                    raise CheckpointError(f"{name}: expert weights stored as [in, out] ({config.model_type}) are not supported")
                packable.add(f"{name}.{stack}")
    return shapes, {name: shape for name, shape in shapes.items() if name in packable}, tied
