"""Bringing a nested directory into a model of vLLM's.

vLLM's own loader would read all shards as one checkpoint. This one takes its place for models whose method is
"sefp": it sends stand-ins of packed tensors through the model's renaming, so that vLLM says which layer each
belongs to, and lets our own reader, which checks headers, map what this process needs. Norms and biases are
loaded as vLLM loads them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from otaro.errors import FormatError, SlowWarning
from otaro.file.checkpoint import resolve_nested
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.kernels import ops
from otaro.sefp.precision import Precision
from otaro.vllm.quantization import METHOD, SefpConfig, stand_in
from otaro.vllm.shares import Shares


class SefpLoader(DefaultModelLoader):
    """vLLM's loader, but for nested models."""

    def download_model(self, model_config: Any) -> None:
        """Fetch a model of the Hub."""
        if model_config.quantization == METHOD:
            self._path(model_config, None)
        else:
            super().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Map the shards that the precision needs, and load what is not packed."""
        if model_config.quantization != METHOD:
            super().load_weights(model, model_config)
            return
        config = get_current_vllm_config().quant_config
        assert isinstance(config, SefpConfig)
        nested = NestedDirectory(self._path(model_config, config.precision))
        nested.require(precision := config.precision or nested.finest)
        offered = ""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal offered
            for offered in nested.schema.packed:
                yield offered, stand_in(nested, offered, model_config.dtype)
            for offered in nested.unpacked:
                yield offered, nested.base.tensor(offered)

        try:
            loaded = model.load_weights(tensors())  # type: ignore[operator]
        except NotImplementedError as error:  # as torch says that a stand-in has no bytes
            kind = type(model).__name__
            raise FormatError(
                f"{nested.path}: {offered} is packed, but vLLM's {kind} wants it as it was"
            ) from error
        if missing := {name for name, _ in model.named_parameters()} - (loaded or set()):
            raise FormatError(
                f"{nested.path}: vLLM's {type(model).__name__} needs {min(missing)}, which no shard holds"
            )
        device = next(model.parameters()).device
        _warn_of_slowness(device)
        for module in model.modules():
            if isinstance(module, Shares):
                module.attach(precision, device)

    def _path(self, model_config: Any, precision: Precision | None) -> Path:
        hub = Hub(model_config.revision, cache_dir=self.load_config.download_dir)
        return resolve_nested(model_config.model, precision, hub)


def _warn_of_slowness(device: torch.device) -> None:
    """Without kernels the same is computed, hundreds of times slower: who did not ask for it should know."""
    name, reason = ops.backend(device)
    if name == "reference" and ops.OVERRIDE not in os.environ:
        warnings.warn(f"{device} has no kernels and will be slow: {reason}", SlowWarning, stacklevel=2)


def register() -> None:
    """Take the place of vLLM's default loader, which opens nested directories without being told to."""
    log = logging.getLogger(model_loader.__name__)
    level = log.level
    log.setLevel(logging.ERROR)  # it would warn in every process, for all models
    register_model_loader("auto")(SefpLoader)
    log.setLevel(level)
