"""The model to be packed: where it lies, which of its tensors are packed, and how to read them a few rows at
a time.

What to pack is asked of the model class itself, built on the meta device from the checkpoint's config
(`otaro.packable`). What the checkpoint has for each of its tensors is asked of transformers: its own
conversions of names, and of values where a checkpoint keeps them in another form. Experts that are stored one
by one, and all that is stored as it is, are read by rows. A tensor that transformers makes of others, or that
is packed transposed (GPT-2's), is read whole.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from otaro.errors import CheckpointError, WeightError
from otaro.errors import brief as brief
from otaro.file.gguf import Gguf, GgufTensors
from otaro.file.gguf_config import read_config
from otaro.file.header import BASE, DTYPES, refuse_file, shard_name
from otaro.file.hub import Hub
from otaro.file.replace import FITS_FILE, QUALITY_FILE
from otaro.file.run import refuse_run
from otaro.packable import Kind, packable
from otaro.sefp.codec import refusal
from otaro.sefp.precision import Precision

BUILTIN = "builtin"
HUB = Hub()  # as its environment variables say

# Files beside the weights that a packed model keeps: tokenizer, chat template, generation defaults, licence.
SIDECARS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip

# How checkpoints name the parts of a fused expert tensor; each list is one convention (Qwen and most others,
# Mixtral).
_EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def resolve_model(
    model: str | os.PathLike[str], patterns: Sequence[str] | None = None, hub: Hub = HUB
) -> Path:
    """The local directory of a model: a directory as it is, `builtin`, or a Hub id, fetched to its cache."""
    path = Path(_name(model))
    if hub.revision is not None and (path.is_dir() or str(model) == BUILTIN):
        raise CheckpointError(
            f"{model} is on this machine and has no revision {hub.revision!r}; leave the revision out"
        )
    if path.is_dir():
        refuse_run(path)
        return path
    if path.exists():
        raise CheckpointError(f"{model} is a file; give the directory of a Hugging Face model")
    if str(model) == BUILTIN:
        from otaro.builtin import MODEL_DIR

        return MODEL_DIR
    return hub.snapshot(str(model), patterns or ["*.json", "*.safetensors", *SIDECARS])


def resolve_nested(model: str | os.PathLike[str], precision: Precision | None = None, hub: Hub = HUB) -> Path:
    """`resolve_model` for nested models, with the shards that `precision` needs; without, all there are."""
    refuse_file(Path(_name(model)))
    path = resolve_model(model, ["config.json", shard_name(BASE), QUALITY_FILE, FITS_FILE, *SIDECARS], hub)
    base = path / shard_name(BASE)
    if base.is_file() and not Path(model).is_dir():
        hub.fetch_planes(str(model), base, precision)
    return path


def _name(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """What was given, if it names a model: nothing at all would be the current folder."""
    if not isinstance(model, str | os.PathLike) or not str(model).strip():
        raise CheckpointError(
            f"model={model!r} names no model; give a directory (. for this one) or a Hub id"
        )
    return model


class Checkpoint:
    """A Hugging Face checkpoint in safetensors, or a GGUF file, by the parameter names of its model class."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gguf = Gguf(directory) if directory.is_file() else None
        files: list[Any]
        if self.gguf is None:
            self.config = _read_config(directory)
            files = _open_all(directory)
            self._model = build_on_meta(self.config)
        else:
            self.config, architecture = read_config(self.gguf)
            self._model = build_on_meta(self.config)
            self.config.architectures = [type(self._model).__name__]
            files = [GgufTensors(self.gguf, self._model, architecture)]
        self.tied: dict[str, str] = dict(self._model.all_tied_weights_keys)
        """{tied tensor: the one that is stored}"""
        self.shapes = {
            name: tuple(t.shape) for name, t in self._model.state_dict().items() if name not in self.tied
        }
        self.buffers = {name for name, _ in self._model.named_buffers()}
        rule = {one.name: one for one in packable(self._model)}
        self.packed = {name: rule[name].shape for name in self.shapes if name in rule}
        """Shapes as packed, of those to pack."""
        self._transposed = {name for name in self.packed if rule[name].kind is Kind.CONV1D}
        self._heads = {name for name in self.packed if rule[name].kind is Kind.HEAD}
        self._file_of: dict[str, _TensorFile] = {}
        self._made: dict[str, _Conversion] = {}
        self._name_tensors(files)
        self._parts = {name: self._find_parts(name, shape) for name, shape in self.shapes.items()}
        for name in self.packed:
            if (dtype := self.stored_dtype(name)) not in (torch.float16, torch.bfloat16, torch.float32):
                raise CheckpointError(
                    f"{name} is {dtype}; SEFP encodes float16, bfloat16 and float32 tensors"
                )
        self._check_tied()

    @property
    def dtype(self) -> torch.dtype:
        """The type most of the checkpoint is stored in: that of its first packed tensor."""
        return self.stored_dtype(next(iter(self.packed)))

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that the model class lacks, less those that it says it has no use for."""
        used = {key for parts in self._parts.values() for key in parts} | set(self.tied)
        ignored = [r"rotary_emb\.inv_freq$", *(self._model._keys_to_ignore_on_load_unexpected or ())]
        left = self._file_of.keys() - used
        return sorted(key for key in left if not any(re.search(pattern, key) for pattern in ignored))

    def stored_dtype(self, name: str) -> torch.dtype:
        """The type `name` is stored in."""
        key = self._parts[name][0]
        return self._made[name].like[name].dtype if name in self._made else self._file_of[key].dtype(key)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, as the model class has it."""
        if name in self._made:
            return self._made[name].read(self._read)[name]
        parts = [self._read(key) for key in self._parts[name]]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(self.shapes[name])

    def rows(self, name: str, count: int) -> Iterator[torch.Tensor]:
        """A tensor as it is packed, as a matrix, leading dimensions flattened, `count` rows at a time."""
        if name in self._made or name in self._transposed:
            whole = self.read(name)
            whole = whole.T.contiguous() if name in self._transposed else whole
            yield from whole.reshape(-1, whole.shape[-1]).split(count)
            return
        waiting: list[torch.Tensor] = []
        for key in self._parts[name]:
            file = self._file_of[key]
            for start in range(0, file.row_count(key), count):
                waiting.append(file.rows(key, start, min(start + count, file.row_count(key))))
                while sum(map(len, waiting)) >= count:
                    joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                    yield joined[:count]
                    waiting = [joined[count:]]
        if any(map(len, waiting)):
            yield torch.cat(waiting)

    def refusal(self, name: str, position: int, value: float) -> WeightError:
        """Of a weight at a position in `rows` that SEFP does not hold: names its index in the checkpoint."""
        if name in self._transposed:
            row, column = divmod(position, self.packed[name][-1])
            position = column * self.packed[name][0] + row
        return refusal(name, self.shapes[name], position, value)

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._file_of[key].shape(key)

    def _read(self, key: str) -> torch.Tensor:
        file = self._file_of[key]
        return file.rows(key, 0, file.row_count(key)).reshape(file.shape(key))

    def _name_tensors(self, files: list[_TensorFile]) -> None:
        """Call what the files hold by the names of the model class, as transformers does on loading them."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        steps, known = get_model_conversion_mapping(self._model), self._model.state_dict()
        names = [step for step in steps if isinstance(step, WeightRenaming)]
        values = [step for step in steps if isinstance(step, WeightConverter)]
        converters = {pattern: step for step in values for pattern in step.source_patterns}
        where, stored = (
            (self._model.base_model_prefix, known),
            {key: file for file in files for key in file.entries},
        )
        conversions: dict[str, _Conversion] = {}
        for key, file in sorted(stored.items(), key=lambda of: dot_natural_key(of[0])):
            becomes, pattern = rename_source_key(key, names, values, *where)
            if becomes not in known and key in known:
                becomes, pattern = rename_source_key(key, [], [], *where)
            name = becomes if pattern is None else rename_source_key(key, names, [], *where)[0]
            name = key if name in stored or name in self._file_of else name  # taken
            if pattern is not None and becomes in known and not _joins_experts(converters[pattern]):
                made = conversions.setdefault(becomes, _Conversion(becomes, converters[pattern], self._model))
                made.sources.append((name, pattern))
            file.call(key, name)
            self._file_of[name] = file
        for made in conversions.values():
            made.like = made.read(self._like)
            self._made |= {name: made for name in made.like if name in known}
        for target, source in self.tied.items():  # of tied tensors either may be the one that is stored
            if source not in self._file_of and source not in self._made and target in self._file_of:
                self._file_of[target].call(target, source)
                self._file_of[source] = self._file_of.pop(target)

    def _like(self, key: str) -> torch.Tensor:
        return torch.empty(self._shape(key), dtype=self._file_of[key].dtype(key), device="meta")

    def _find_parts(self, name: str, shape: Sequence[int]) -> list[str]:
        """The checkpoint's tensors that make up a model tensor, in order of rows."""
        if name in self._made or name in self._file_of:
            stored = tuple(self._made[name].like[name].shape) if name in self._made else self._shape(name)
            if stored != tuple(shape):
                raise CheckpointError(f"{name} has shape {list(stored)}, config.json implies {list(shape)}")
            return [key for key, _ in self._made[name].sources] if name in self._made else [name]
        stem, _, last = name.rpartition(".")
        for convention in _EXPERT_PARTS.get(last, ()):
            parts = [f"{stem}.{expert}.{part}.weight" for expert in range(shape[0]) for part in convention]
            if parts[0] in self._file_of:
                return self._check_parts(name, parts, shape)
        if name in self._heads:
            raise CheckpointError(
                f"{self.directory} holds a base model, without the head {name}, and nothing can be "
                "generated without one; "
                "give the checkpoint of the whole model"
            )
        raise CheckpointError(
            f"{self.directory} lacks the tensor {name}, which {self.config.model_type} models need, "
            "or has it under a name that is not known here"
        )

    def _check_parts(self, name: str, parts: list[str], shape: Sequence[int]) -> list[str]:
        if missing := [part for part in parts if part not in self._file_of]:
            raise CheckpointError(f"{self.directory} lacks the tensor {missing[0]}, a part of {name}")
        rows = sum(self._shape(part)[0] for part in parts)
        widths = {self._shape(part)[-1] for part in parts}
        if rows != shape[0] * shape[1] or widths != {shape[2]}:
            raise CheckpointError(
                f"the parts of {name} do not add up to the shape {list(shape)} that config.json implies"
            )
        return parts

    def _check_tied(self) -> None:
        """A head that is tied in the config must not be stored with other values."""
        for target, source in self.tied.items():
            if target in self._file_of and not torch.equal(self._read(target), self.read(source)):
                raise CheckpointError(
                    f"config.json ties {target} to {source}, but the checkpoint stores different values for "
                    "the two; "
                    "set tie_word_embeddings to false in config.json to keep both"
                )


class _TensorFile:
    """A safetensors file, read by rows.

    safetensors itself either maps a file, and then mapped pages make the process look as large as the model,
    or reads whole tensors. So it checks the file, and the rows are read here.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        length = int.from_bytes(self._file.read(8), "little")
        self.entries: dict[str, Any] = json.loads(self._file.read(length))
        self.entries.pop("__metadata__", None)
        self._start = 8 + length

    def call(self, key: str, name: str) -> None:
        """Call a tensor by another name from now on."""
        self.entries[name] = self.entries.pop(key)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key]["shape"])

    def dtype(self, key: str) -> torch.dtype:
        name = self.entries[key]["dtype"]
        if name not in DTYPES:
            raise CheckpointError(
                f"{key} is stored as {name}, which is not supported; convert the checkpoint to bfloat16"
            )
        return DTYPES[name]

    def row_count(self, key: str) -> int:
        return prod(self.shape(key)[:-1])

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` of the tensor, leading dimensions flattened."""
        length = self.shape(key)[-1] if self.shape(key) else 1
        row_bytes = length * self.dtype(key).itemsize
        buffer = bytearray((last - first) * row_bytes)
        self._file.seek(self._start + self.entries[key]["data_offsets"][0] + first * row_bytes)
        view = memoryview(buffer)
        while view:
            if not (count := self._file.readinto(view)):
                raise CheckpointError(
                    f"{self._file.name} ends before {key} does; it was changed while it was read"
                )
            view = view[count:]
        if not buffer:
            return torch.empty(last - first, length, dtype=self.dtype(key))
        return torch.frombuffer(buffer, dtype=self.dtype(key)).view(last - first, length)


def _read_config(directory: Path) -> Any:
    """The checkpoint's configuration; refused if it is that of a quantized model."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever a strange config makes transformers stumble over
        raise CheckpointError(
            f"{directory}: config.json describes no model that transformers knows: {brief(error)}"
        ) from error
    quantized, mlx = (getattr(config, name, None) for name in ("quantization_config", "quantization"))
    if quantized is not None or mlx:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        method = method or ("MLX" if mlx else None)
        raise CheckpointError(
            f"{directory} is already a nested model; use it as it is"
            if method == "sefp"
            else f"{directory} is quantized ({method}); pack the checkpoint it was made from"
        )
    return config


def _open_all(directory: Path) -> list[_TensorFile]:
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
                f"{directory} holds only pickled weights ({pickled[0]}), which can run code when opened and "
                "are not read here; "
                "convert them where you trust them: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
        raise CheckpointError(f"{directory} holds no model.safetensors and no model.safetensors.index.json")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{directory} lacks {file.name}, which its index names")
    return [_TensorFile(file) for file in files]


@dataclass
class _Conversion:
    """Tensors that transformers makes of others: splits, joins, turns round."""

    name: str
    """Of the first tensor made."""
    converter: Any
    model: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Each with the pattern of the converter that it fits, in transformers' order."""
    like: dict[str, torch.Tensor] = field(default_factory=dict)
    """What is made, without values."""

    def read(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors made, by name."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.name, key, pattern, read(key))
        try:
            made = converter.convert(self.name, model=self.model, config=self.model.config)
        except Exception as error:  # whatever odd shapes make transformers stumble over
            sources = ", ".join(key for key, _ in self.sources)
            raise CheckpointError(f"{self.name} cannot be made of {sources}: {brief(error)}") from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _joins_experts(converter: Any) -> bool:
    """Whether it lays experts behind each other that are stored one by one: these are read by rows."""
    parts = tuple(pattern.split(".")[-2] for pattern in converter.source_patterns if pattern.count("."))
    return parts in _EXPERT_PARTS.get(converter.target_patterns[0].rpartition(".")[2], ())


def build_on_meta(config: Any) -> Any:
    """The model on the meta device; refused if load could not open it, or it could generate nothing."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as above
        raise CheckpointError(
            f"transformers cannot build a causal {config.model_type!r} model: {brief(error)}"
        ) from error
    kind = f"{type(model).__name__} ({config.model_type})"
    if not model.can_generate():
        raise CheckpointError(
            f"{kind} is not a model that generates text, and there is nothing else to run it for here"
        )
    if _is_encoder(model):
        raise CheckpointError(
            f"{kind} is an encoder as config.json sets it up: its tokens see those behind them, so it "
            "cannot generate text"
        )
    return model


def _is_encoder(model: Any) -> bool:
    """Whether attention looks ahead: what can be an encoder's says that it is not a decoder's, nor causal."""
    said = {getattr(module, name, None) for module in model.modules() for name in ("is_decoder", "is_causal")}
    return False in said and True not in said
