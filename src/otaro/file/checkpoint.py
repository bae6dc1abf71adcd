"""The model to be packed: where it lies, which of its tensors are packed, and how to read them a few rows at a time.

What to pack is asked of the model class itself, built on the meta device from the checkpoint's config: every linear weight,
the token embedding, the output head (once, if tied), and the fused expert stacks of mixtures of experts. So any architecture
that transformers builds from plain `nn.Linear` and `nn.Embedding` modules can be packed. Norms, biases, routers, and modules
of other classes are kept as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from otaro.errors import CheckpointError
from otaro.errors import brief as brief
from otaro.file.header import BASE, DTYPES, shard_name
from otaro.file.hub import Hub
from otaro.file.replace import QUALITY_FILE
from otaro.file.run import refuse_run
from otaro.sefp.precision import Precision

BUILTIN = "builtin"
HUB = Hub()  # as its environment variables say

# Files beside the weights that a packed model keeps: tokenizer, chat template, generation defaults, licence.
SIDECARS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip

# How checkpoints name the parts of a fused expert tensor; each list is one convention (Qwen and most others, Mixtral).
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def resolve_model(model: str | os.PathLike[str], patterns: Sequence[str] | None = None, hub: Hub = HUB) -> Path:
    """The local directory of a model: a directory as it is, `builtin`, or a Hub id, downloaded into the Hub's cache."""
    path = Path(model)
    if hub.revision is not None and (path.is_dir() or str(model) == BUILTIN):
        raise CheckpointError(f"{model} is on this machine and has no revision {hub.revision!r}; leave the revision out")
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
    """`resolve_model` for nested models, with the shards that `precision` needs; without one, all that the Hub has."""
    path = resolve_model(model, ["config.json", shard_name(BASE), QUALITY_FILE, *SIDECARS], hub)
    base = path / shard_name(BASE)
    if base.is_file() and not Path(model).is_dir():
        hub.fetch_planes(str(model), base, precision)
    return path


class Checkpoint:
    """A Hugging Face checkpoint in safetensors files, seen under the parameter names of its model class."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _read_config(directory)
        files = _open_all(directory)
        described = _describe_model(self.config)
        self.shapes, self.packed = described.shapes, described.packed
        self.tied, self.buffers = described.tied, described.buffers
        for file in files:
            file.rename(described.rename)
        self._file_of = {key: file for file in files for key in file.entries}
        self._parts = {name: self._find_parts(name, shape) for name, shape in self.shapes.items()}
        for name in self.packed:
            if (dtype := self.stored_dtype(name)) not in (torch.float16, torch.bfloat16, torch.float32):
                raise CheckpointError(f"{name} is {dtype}; SEFP encodes float16, bfloat16 and float32 tensors")
        self._check_tied()

    @property
    def dtype(self) -> torch.dtype:
        """The type most of the checkpoint is stored in: that of its first packed tensor."""
        return self.stored_dtype(next(iter(self.packed)))

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that the model class does not have, as transformers would not load them either."""
        used = {key for parts in self._parts.values() for key in parts} | set(self.tied)
        return sorted(key for key in self._file_of.keys() - used if not key.endswith("rotary_emb.inv_freq"))

    def stored_dtype(self, name: str) -> torch.dtype:
        """The type `name` is stored in."""
        key = self._parts[name][0]
        return self._file_of[key].dtype(key)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        parts = [self._read(key) for key in self._parts[name]]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(self.shapes[name])

    def rows(self, name: str, count: int) -> Iterator[torch.Tensor]:
        """The tensor as a matrix, leading dimensions flattened, `count` rows at a time."""
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

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._file_of[key].shape(key)

    def _read(self, key: str) -> torch.Tensor:
        file = self._file_of[key]
        return file.rows(key, 0, file.row_count(key)).reshape(file.shape(key))

    def _find_parts(self, name: str, shape: Sequence[int]) -> list[str]:
        """The checkpoint's tensors that make up a model tensor, in order of rows."""
        if name in self._file_of:
            if self._shape(name) != tuple(shape):
                raise CheckpointError(f"{name} has shape {list(self._shape(name))}, config.json implies {list(shape)}")
            return [name]
        stem, _, last = name.rpartition(".")
        for convention in _EXPERT_PARTS.get(last, ()):
            parts = [f"{stem}.{expert}.{part}.weight" for expert in range(shape[0]) for part in convention]
            if parts[0] in self._file_of:
                return self._check_parts(name, parts, shape)
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


class _TensorFile:
    """A safetensors file, read by rows.

    safetensors itself either maps a file, and then mapped pages make the process look as large as the model, or reads whole
    tensors. So it checks the file, and the rows are read here.
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

    def rename(self, to: Callable[[str], str]) -> None:
        """Call tensors by other names from now on, where these are free."""
        renamed = {key: to(key) for key in self.entries}
        self.entries = {n if (n := renamed[key]) not in self.entries else key: e for key, e in self.entries.items()}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key]["shape"])

    def dtype(self, key: str) -> torch.dtype:
        name = self.entries[key]["dtype"]
        if name not in DTYPES:
            raise CheckpointError(f"{key} is stored as {name}, which is not supported; convert the checkpoint to bfloat16")
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
                raise CheckpointError(f"{self._file.name} ends before {key} does; it was changed while it was read")
            view = view[count:]
        if not buffer:
            return torch.empty(last - first, length, dtype=self.dtype(key))
        return torch.frombuffer(buffer, dtype=self.dtype(key)).view(last - first, length)


def _read_config(directory: Path) -> Any:
    """The checkpoint's configuration; refused if it is that of a quantised model."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever a strange config makes transformers stumble over
        raise CheckpointError(f"{directory}: config.json describes no model that transformers knows: {brief(error)}") from error
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(
            f"{directory} is already a nested model; use it as it is"
            if method == "sefp"
            else f"{directory} is quantised ({method}); pack the checkpoint it was made from"
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
                f"{directory} holds only pickled weights ({pickled[0]}), which can run code when opened and are not read here; "
                "convert them where you trust them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
        raise CheckpointError(f"{directory} holds no model.safetensors and no model.safetensors.index.json")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{directory} lacks {file.name}, which its index names")
    return [_TensorFile(file) for file in files]


@dataclass(frozen=True)
class _Description:
    """What a model class says of its tensors."""

    shapes: dict[str, tuple[int, ...]]
    packed: dict[str, tuple[int, ...]]
    """Those of them to pack."""
    tied: dict[str, str]
    """{tied tensor: the one that is stored}"""
    buffers: set[str]
    rename: Callable[[str], str]
    """From the name that a checkpoint may have for a tensor to the class's own."""


def _describe_model(config: Any) -> _Description:
    """Ask the model class; refused if load could not open such a model, or nothing could be generated with it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as above
        raise CheckpointError(f"transformers cannot build a causal {config.model_type!r} model: {brief(error)}") from error
    kind = f"{type(model).__name__} ({config.model_type})"
    if not model.can_generate():
        raise CheckpointError(f"{kind} is not a model that generates text, and there is nothing else to run it for here")
    if _is_encoder(model):
        raise CheckpointError(
            f"{kind} is an encoder as config.json sets it up: its tokens see those behind them, so it cannot generate text"
        )
    tied = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    # Exactly these classes: a subclass may do more in its forward (Gemma's embedding scales), which a stand-in would lose.
    packable = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    embedding = model.get_input_embeddings()
    packable |= {f"{n}.weight" for n, m in model.named_modules() if m is embedding and type(m) is torch.nn.Embedding}
    for name, module in model.named_modules():
        for stack in _EXPERT_PARTS:
            if isinstance(getattr(module, stack, None), torch.nn.Parameter):
                # Set by transformers for experts whose plain forward takes one after the other, as packed ones are run.
                transposed = getattr(module, "is_transposed", None)
                if transposed is not False:
                    kept = "kept in a form of its own" if transposed is None else "stored as [in, out]"
                    raise CheckpointError(f"{name}: expert weights {kept} ({config.model_type}) are not supported")
                packable.add(f"{name}.{stack}")
    buffers = {name for name, _ in model.named_buffers()}
    packed = {name: shape for name, shape in shapes.items() if name in packable}
    return _Description(shapes, packed, tied, buffers, _renaming(model))


def _renaming(model: Any) -> Callable[[str], str]:
    """How transformers itself names what it finds in checkpoints of this class, older and upstream ones among them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    names = [step for step in steps if isinstance(step, WeightRenaming)]
    values = [step for step in steps if not isinstance(step, WeightRenaming)]
    known = model.state_dict()

    def rename(key: str) -> str:
        name: str = rename_source_key(key, names, [], model.base_model_prefix, known)[0]
        becomes, changed = rename_source_key(key, names, values, model.base_model_prefix, known)
        if changed is not None and becomes in known and becomes.rpartition(".")[2] not in _EXPERT_PARTS:
            raise CheckpointError(f"{key} is stored in another form than {becomes}, which it becomes; that is not supported")
        return name

    return rename


def _is_encoder(model: Any) -> bool:
    """Whether attention looks ahead: modules that can be of an encoder say that they are not of a decoder, nor causal."""
    said = {getattr(module, name, None) for module in model.modules() for name in ("is_decoder", "is_causal")}
    return False in said and True not in said
