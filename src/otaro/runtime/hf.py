"""The transformers plug-in: `AutoModelForCausalLM.from_pretrained(DIR)` opens a nested directory,
`save_pretrained` writes one.

transformers sees an ordinary checkpoint of norms and biases. Before it loads them, packed modules take the
place of linears, embedding and experts; after it, they are mapped from the shards by our own reader, which
checks headers, as far as the precision needs. No tensor of the file is copied, and none can be left at a
random initial value: a tensor that neither the file nor a tied partner provides is refused by name.

Without `import otaro` transformers does not know the method "sefp". It then finds base nibbles under the
names of the weights, in another shape, and stops with a size mismatch instead of carrying on with random
weights: that is why FORMAT.md names them so.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto as quantizers
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from otaro.errors import FormatError, OtaroError
from otaro.file.header import BASE, SCALES, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory, NestedWriter
from otaro.file.pack import write_config
from otaro.file.replace import DECODER_FILE
from otaro.packable import Kind, Packable, embedding_scale, packable
from otaro.runtime.modules import PackedWeight, SefpConv1D, SefpEmbedding, SefpExperts, SefpLinear, SefpModule
from otaro.runtime.precision import Attachment, attachment, set_precision
from otaro.sefp.codec import Reconstruction
from otaro.sefp.precision import GROUP_SIZE, Precision


@register_quantization_config("sefp")
@dataclass
class SefpConfig(QuantizationConfigMixin):
    """The `quantization_config` of a nested model. `precision` is how to open it: by default the finest."""

    group_size: int = GROUP_SIZE
    reconstruction: Reconstruction = "midpoint"
    precision: str | None = None
    quant_method: str = "sefp"

    @property
    def get_apply_tensor_subclass(self) -> Any:
        """What peft asks every quantized model for before it adds LoRA: packed weights do not take any."""
        raise OtaroError(
            "packed weights are for running and take no LoRA: tune the checkpoint they were packed from, "
            "with "
            "otaro tune --lora or peft, merge, and pack that"
        )

    def get_loading_attributes(self) -> dict[str, Any]:
        """What an argument to `from_pretrained` may override."""
        return {"precision": self.precision}

    def to_dict(self) -> dict[str, Any]:
        """As stored in config.json: the precision belongs to this run, not to the file."""
        stored = asdict(self)
        del stored["precision"]
        return stored


_hub: ContextVar[Hub] = ContextVar("_hub")  # as the running `from_pretrained` was told to reach it


def _remember_hub() -> None:
    """Let planes be fetched as the base shard was: quantizers are not told what `from_pretrained` was."""
    original = PreTrainedModel.from_pretrained.__func__

    @wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        told = {
            name: kwargs[name] for name in ("token", "local_files_only", "force_download") if name in kwargs
        }
        before = _hub.set(Hub(**told))
        try:
            return original(cls, *args, **kwargs)
        finally:
            _hub.reset(before)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


_remember_hub()

# Without this, a quantization_config given to from_pretrained would be ignored for a model that has its own.
quantizers.LOADING_ATTRIBUTES_CONFIG_TYPES += (SefpConfig,)


@register_quantizer("sefp")
class SefpQuantizer(HfQuantizer):
    """Swaps modules before loading and attaches the planes after it."""

    nested: NestedDirectory

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str], **kwargs: Any
    ) -> None:
        # absolute, as the working directory may change before the next shard is opened
        opened = [Path(file).absolute() for file in checkpoint_files]
        if Path(model.config.name_or_path).is_dir():
            model.config.name_or_path = str(Path(model.config.name_or_path).absolute())
        else:  # transformers has fetched the base shard alone
            asked = self.quantization_config.precision
            _hub.get().fetch_planes(model.config.name_or_path, opened[0], Precision(asked) if asked else None)
        self.nested = NestedDirectory(opened[0].parent)
        if [path.name for path in opened] != [shard_name(BASE)]:
            raise FormatError(
                f"{self.nested.path}: config.json points transformers to {opened[0].name} instead of "
                f"{shard_name(BASE)}; "
                "fetch it from where the shards came from"
            )
        schema = self.nested.schema
        stated = (self.quantization_config.group_size, self.quantization_config.reconstruction)
        if stated != (schema.group_size, schema.reconstruction):
            raise FormatError(
                f"{self.nested.path}: config.json says group size and reconstruction are {stated}, "
                f"{shard_name(BASE)} says "
                f"{(schema.group_size, schema.reconstruction)}; the files are of different models"
            )
        tied, rule = dict(model.all_tied_weights_keys), {one.name: one for one in packable(model)}
        _check_complete(model, self.nested, tied, rule)
        self._modules = _swap_modules(model, self.nested, tied, rule)
        # What we swapped is neither missing nor unexpected nor tied by transformers.
        model.all_tied_weights_keys = {
            target: source for target, source in tied.items() if source not in schema.packed
        }
        names = "|".join(map(re.escape, schema.packed))
        model._keys_to_ignore_on_load_unexpected = {rf"^(?:{names})(?:{re.escape(SCALES)})?$"}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        devices = getattr(model, "hf_device_map", None)
        if not any(True for _ in model.parameters()):
            model.add_module("_anchor", _Anchor(model.config.dtype, _device_of("", devices or {})))
        devices = devices or {"": model.device}
        for name, module in self._modules.items():
            if module.packed.base is None:
                module.packed.attach(_device_of(name, devices))
        model.sefp = Attachment(self.nested, self._modules)
        model.save_pretrained = MethodType(save_pretrained, model)
        model.tie_weights = MethodType(tie_weights, model)
        set_precision(model, Precision(self.quantization_config.precision or self.nested.finest))
        if model.can_generate():
            # transformers' generation is slow to import
            from otaro.runtime.generate import serve_with_decoder

            serve_with_decoder(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Saving goes through the model's `save_pretrained`, which we replaced: this would lose planes."""
        raise OtaroError("save a nested model with model.save_pretrained(DIR)")

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Yes, by the replaced `save_pretrained`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights are for running; tune the checkpoint they came from."""
        return False


class _Anchor(nn.Module):
    """Tells device and type of a model without parameters to tell them: all of an OLMo is packed."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)

    def _save_to_state_dict(self, *args: Any) -> None:
        """Nothing: it is no part of the model."""


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    **ignored: Any,
) -> None:
    """Write the nested model again: the same planes, the same bytes, as far as the model's own directory has
    them.

    Replaces the method of that name on nested models. Tensors outside the planes that were changed since
    loading are written as they are now, and give the model an identity of its own; unchanged ones as they
    were stored. A nested model in that directory is replaced, other files in it, a tokenizer's say, stay, and
    one that holds other weights is refused.
    """
    if state_dict is not None or push_to_hub:
        raise OtaroError(
            "a nested model is saved from its own planes: call save_pretrained(DIR) alone, "
            "then push_to_hub(...)"
        )
    if not is_main_process:
        return
    nested = attachment(model).nested
    finest = nested.finest
    nested.require(finest)
    tensors = _unpacked_now(model, nested)
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    target, original = Path(save_directory), nested.base.header
    with NestedWriter.create(
        target, nested.schema, layout, finest=finest, original=original, overwrite=True
    ) as writer:
        for name in nested.schema.packed:
            writer.append_stored(BASE, name + SCALES, nested.base.tensor(name + SCALES))
            for plane in range(BASE, finest.mantissa_bits + 1):
                writer.append_stored(plane, name, nested.plane(plane).tensor(name))
        for name, tensor in tensors.items():
            writer.append_stored(BASE, name, tensor)
        _save_configs(model, nested.path, writer.directory)
    if (nested.path / DECODER_FILE).is_file():
        # which loads models, and so needs this module
        from otaro.runtime.decoder_file import write_decoder_file

        write_decoder_file(target)


def _unpacked_now(model: Any, nested: NestedDirectory) -> dict[str, torch.Tensor]:
    """The tensors outside the planes: as stored where they have not changed, else as they are."""
    tensors = {name: nested.base.tensor(name) for name in nested.unpacked}
    state = model.state_dict()
    for name, now in state.items():
        if name in tensors:
            if not torch.equal(tensors[name].to(now.dtype), now.cpu()):
                tensors[name] = now
        elif (source := model.all_tied_weights_keys.get(name)) is None or not torch.equal(now, state[source]):
            was = "is none of the nested model's" if source is None else f"is no longer tied to {source}"
            raise OtaroError(
                f"{name} {was}; save_pretrained writes the tensors that the model was loaded with"
            )
    return tensors


def tie_weights(model: Any, *args: Any, **kwargs: Any) -> None:
    """Nothing: tied modules share a packed weight, and other tensors were tied when the model was loaded.

    Replaces the method of that name, which looks for parameters. Other libraries call it to be sure
    (lm-evaluation-harness).
    """


def _save_configs(model: Any, source: Path, directory: Path) -> None:
    """Write config.json and generation_config.json; copied where they say what they said at loading."""
    from transformers import AutoConfig, GenerationConfig

    config = copy.deepcopy(model.config)
    stored_dtype = AutoConfig.from_pretrained(source, trust_remote_code=False).dtype
    config.dtype = stored_dtype or config.dtype  # loading may have chosen another for this run
    write_config(config, directory)
    if model.can_generate():
        stored = source / "generation_config.json"
        if stored.is_file() and GenerationConfig.from_pretrained(source) == model.generation_config:
            shutil.copyfile(stored, directory / stored.name)
        else:
            model.generation_config.save_pretrained(directory)


def _check_complete(
    model: nn.Module, nested: NestedDirectory, tied: dict[str, str], rule: dict[str, Packable]
) -> None:
    """Every tensor must come from the file or a tied partner, in the right shape; none is left."""
    expected = model.state_dict()
    if left := (nested.schema.packed.keys() | nested.unpacked.keys()) - expected.keys():
        raise FormatError(
            f"{nested.path}: {shard_name(BASE)} holds {min(left)}, which {type(model).__name__} by "
            "config.json lacks; "
            "open nested models with AutoModelForCausalLM"
        )
    for name, tensor in expected.items():
        needed = tuple(tensor.shape)
        if name in nested.schema.packed:
            if name not in rule:
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                raise FormatError(f"{nested.path}: {name} is packed, but {kind} cannot run packed weights")
            shape, needed = nested.schema.packed[name], rule[name].shape
        elif name in nested.unpacked:
            shape = nested.unpacked[name].shape
        elif name in tied:
            continue
        else:
            raise FormatError(
                f"{nested.path}: {type(model).__name__} by config.json needs {name}, which no shard holds; "
                "open nested models with AutoModelForCausalLM"
            )
        if needed != shape:
            raise FormatError(
                f"{nested.path}: {name} is {list(shape)} in {shard_name(BASE)}, "
                f"but the model that config.json describes has {list(needed)}"
            )


def _swap_modules(
    model: Any, nested: NestedDirectory, tied: dict[str, str], rule: dict[str, Packable]
) -> dict[str, SefpModule]:
    """Put packed modules in place of what is packed; returns them by name, tied ones sharing a weight."""
    weights = {name: PackedWeight(nested, name) for name in nested.schema.packed}
    modules: dict[str, SefpModule] = {}
    for name, packed in _with_tied(weights, tied):
        path, parameter, kind, owner = rule[name]
        dtype = getattr(owner, parameter).dtype
        if kind is Kind.EXPERTS:
            # The stack replaces one parameter of the experts module, whose plain forward indexes it expert by
            # expert.
            modules[name] = SefpExperts(packed, dtype)
            delattr(owner, parameter)
            owner._is_hf_initialized = True
            owner.config._experts_implementation = "eager"
        elif isinstance(owner, nn.Embedding):
            modules[path] = SefpEmbedding(packed, dtype, embedding_scale(owner) or 1.0)
        else:
            modules[path] = (SefpConv1D if kind is Kind.CONV1D else SefpLinear)(packed, dtype, owner.bias)
    for path, module in modules.items():
        object.__setattr__(module, "_is_hf_initialized", True)  # or transformers would fill in random values
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return modules


def _with_tied(weights: dict[str, PackedWeight], tied: dict[str, str]) -> Iterator[tuple[str, PackedWeight]]:
    yield from weights.items()
    yield from (
        (target, weights[source])
        for target, source in tied.items()
        if source in weights and target not in weights
    )


def _device_of(name: str, devices: dict[str, Any]) -> Any:
    """The device of the longest prefix of `name` in a device map."""
    prefixes = [
        prefix for prefix in devices if prefix == "" or name == prefix or name.startswith(prefix + ".")
    ]
    return devices[max(prefixes, key=len)] if prefixes else "cpu"
