"""Opening a nested model: `otaro.load`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from otaro.errors import CheckpointError, FormatError, OtaroError, PrecisionError, SlowWarning, brief
from otaro.file.checkpoint import BUILTIN, resolve_nested
from otaro.file.fits import Fit, finest_of, is_fit, known
from otaro.file.header import BASE, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.kernels import ops
from otaro.runtime import hf  # noqa: F401 (registers the plug-in)
from otaro.runtime.precision import PrecisionLike, set_precision
from otaro.sefp.precision import Precision, of_mantissa_bits


def load(
    model: str | os.PathLike[str],
    precision: PrecisionLike | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Open a nested directory (or the Hub id of one) as a transformers model, ready to run at `precision`.

    Only the shards that `precision` needs are mapped (and, from the Hub, fetched); the default is the finest
    that the directory, or the repository on the Hub, has. `revision`, `token` and `cache_dir` are those of
    transformers. It may be a mapping as `set_precision` takes it; the pattern "*" then says what other
    modules run at. `fit:90MB` is a fit that `otaro fit` made for the directory. `dtype` is the type of
    activations: float32 on the CPU unless said otherwise, elsewhere the checkpoint's own.

    >>> model = otaro.load("my-model-sefp", "E5M4")                          # doctest: +SKIP
    """
    from transformers import AutoModelForCausalLM

    check_device(device)
    _warn_of_slowness(torch.device(device))
    if not isinstance(precision, str | Precision | Fit | Mapping | None):
        raise PrecisionError(
            f"precision={precision!r}: give one such as E5M4, or a mapping of modules to them"
        )
    by_pattern = {"*": precision} if isinstance(precision, str | Precision | Fit) else dict(precision or {})
    if str(model) == BUILTIN:
        raise FormatError(
            "the built-in model is an ordinary checkpoint; pack it first: otaro pack builtin DIR"
        )
    hub = Hub(revision, token, cache_dir)
    found = {pattern: _known(one, model, hub) for pattern, one in by_pattern.items()}
    named = [finest_of(one) for one in found.values()]
    path = resolve_nested(model, max(named) if "*" in found else None, hub)
    nested = NestedDirectory(path)  # says what is wrong before transformers gets to see the directory
    nested.require(max(named, default=nested.finest))
    config = _read_config(path)
    _check_generation_config(path)
    others = found.get("*")
    if isinstance(others, Precision):
        del found["*"]
    elif others is not None:
        others = of_mantissa_bits(BASE)  # of no module once the fit is set
    config.quantization_config = {**config.quantization_config, "precision": others and str(others)}
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else (config.dtype or torch.float16)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, device_map={"": torch.device(device)}, trust_remote_code=False
        )
    except (OtaroError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the shards were checked, so it is the config that transformers stumbles over
        raise FormatError(
            f"{path}: transformers cannot build what config.json describes: {brief(error)}"
        ) from error
    if found:
        set_precision(loaded, found)
    return loaded


def _known(precision: str | Precision | Fit, model: str | os.PathLike[str], hub: Hub) -> Precision | Fit:
    """A precision by its name; for a fit, the file that has it and the base shard are fetched if need be."""
    if is_fit(precision):
        return known(NestedDirectory(resolve_nested(model, of_mantissa_bits(BASE), hub)), precision)
    return precision if isinstance(precision, Fit) else Precision(precision)


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has files of one."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((path / name).is_file() for name in names)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a model's directory; refused by name where there is none."""
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        raise OtaroError(f"{path} has no tokenizer; copy the tokenizer files of the original model into it")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a strange tokenizer makes transformers stumble over
        what = brief(error).rstrip(":")
        if not (path / "tokenizer.json").is_file():
            what += "; it has no tokenizer.json: copy the tokenizer files of the original model into it"
        raise CheckpointError(f"{path}: transformers cannot open its tokenizer: {what}") from error


def check_device(device: str | torch.device) -> None:
    """Refuse a device that this machine does not have."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise OtaroError(f"unknown device {device!r}; use cpu, cuda, cuda:1, ...") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise OtaroError(f"device {device!r}: this torch sees no NVIDIA GPU; use cpu")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise OtaroError(
            f"device {device!r}: this machine has {torch.cuda.device_count()} of them, counted from 0"
        )
    try:
        usable = kind != "meta" and torch.zeros(1, device=device).item() == 0
    except (RuntimeError, NotImplementedError, AssertionError):  # as torch says that it was built without
        usable = False
    if not usable:
        raise OtaroError(
            f"device {device!r}: this torch cannot compute on {kind}; use cpu, cuda, cuda:1, ..."
        )


def _warn_of_slowness(device: torch.device) -> None:
    """A GPU without kernels computes the same, hundreds of times slower: who did not ask should know."""
    if device.type == "cuda" and ops.OVERRIDE not in os.environ:
        name, reason = ops.backend(device)
        if name == "reference":
            warnings.warn(f"{device} has no kernels and will be slow: {reason}", SlowWarning, stacklevel=3)


def _check_generation_config(path: Path) -> None:
    """Refuse one that transformers would pass over without a word: it has the end of a text."""
    file = path / "generation_config.json"
    try:
        fine = not file.is_file() or isinstance(json.loads(file.read_text()), dict)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise FormatError(f"{file} is no JSON object; fetch it from where the shards came from, or delete it")


def _read_config(path: Path) -> Any:
    """The transformers configuration of a nested directory, which must say that it is one."""
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise FormatError(f"{path} has no config.json; fetch it from where the shards came from")
    try:
        raw = json.loads(file.read_text())
        stated = (raw["quantization_config"]["quant_method"], raw["transformers_weights"])
    except (ValueError, KeyError, TypeError):
        stated = None
    if stated != ("sefp", shard_name(BASE)):
        raise FormatError(
            f"{path}: config.json does not describe a nested model; fetch it from where the shards came from"
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a strange config makes transformers stumble over
        raise FormatError(
            f"{path}: config.json describes no model that transformers knows: {brief(error)}"
        ) from error
