"""Logits of a long text in little memory: layers read a window whole, the head a few positions at a time.

A window of 2,048 positions over Gemma's 262,144 words is 2 GB of logits, and as much again for every step of
a loss on them. But the head looks at one position at a time. So `SlicedModel` runs the layers over the
window, keeps what they leave (a few thousand numbers a position, the `states`), and makes logits of a slice
of them whenever they are asked for.

Which part of a class is "the layers" transformers knows (`get_decoder`); what comes after them differs: a
product, a cap on the logits (Gemma 2), a scale (Granite, Cohere). None of that is written again here. Layers
run inside the model's own forward, which is left as soon as they are done; the head runs by the same forward,
on a copy of the model whose layers are replaced by states that are there already. Whether that gives the
model's own logits is tried on the first tokens; if it does not, the states are the whole logits.

States take little room and keep what their head needs: `KeptStates` has those of a whole text in a file, and
with a head that stays as it was when they were made, so that a model can be compared with one that is gone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

SLICE = 1 << 24  # logits made at once, 64 MB in float32: a comparison takes five times that
_TRIED = 4  # tokens that show whether the head can be run apart
_ROWS = 1 << 21  # weights of a frozen head in float32 at a time


class _LayersAreDone(Exception):
    def __init__(self, output: Any) -> None:
        self.output = output


class Ready(nn.Module):
    """Stands for layers whose output is there."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output, whatever is given."""
        return self.output


class SlicedModel:
    """A causal language model whose layers and head run apart."""

    def __init__(self, model: Any) -> None:
        self.model = model
        layers = model.get_decoder()
        self._path = next((name for name, module in model.named_modules() if module is layers), "")
        self._head: Any = None
        self._output: Any = None
        self.is_whole = not self._path or not self._fits()
        """Whether the states are the logits, since the head cannot be run apart."""

    @property
    def slice(self) -> int:
        """Positions whose logits are made at once."""
        return max(8, SLICE // int(self.model.config.get_text_config().vocab_size))

    @torch.inference_mode()
    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """What the head reads at each of the token ids [tokens]: [tokens, width]."""
        if self.is_whole:
            logits: torch.Tensor = self.model(self._batch(ids), use_cache=False).logits[0]
            return logits
        output = self._layers(ids)
        self._output = replace(output, last_hidden_state=None)  # the rest of it, for the head's forward
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits [positions, vocabulary] of some states."""
        return states if self.is_whole else _run_head(self._head, self._output, states)

    def frozen_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From states to logits as now, whatever becomes of the model's weights: the head's are copied."""
        if self.is_whole:
            return lambda states: states
        head, output = _without_layers(self.model, self._path), self._output
        own = self.model.get_output_embeddings()
        place = next(name for name, module in self.model.named_modules() if module is own)
        _set(head, place, _FrozenLinear(own))
        return lambda states: _run_head(head, output, states)

    def _batch(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.unsqueeze(0).to(self.model.device)

    def _layers(self, ids: torch.Tensor) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            raise _LayersAreDone(output)

        hook = self.model.get_submodule(self._path).register_forward_hook(leave)
        try:
            self.model(self._batch(ids), use_cache=False)
        except _LayersAreDone as done:
            return done.output
        finally:
            hook.remove()
        raise TypeError("the layers were not called")

    @torch.inference_mode()
    def _fits(self) -> bool:
        """Whether layers and head run apart give what they give together, up to the order of a sum."""
        ids = torch.arange(_TRIED) % int(self.model.config.get_text_config().vocab_size)
        whole = self.model(self._batch(ids), use_cache=False).logits[0]
        self._head, self.is_whole = _without_layers(self.model, self._path), False
        try:
            apart = self.logits(self.states(ids))
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError):  # a class made otherwise
            return False
        rounding = 64 * torch.finfo(whole.dtype).eps * whole.abs().max()
        return apart.shape == whole.shape and bool((apart - whole).abs().max() <= rounding)


def _without_layers(model: Any, path: str) -> Any:
    """A copy of the model that shares its modules, but has `Ready` in place of the layers."""
    head = _shallow(model)
    _set(head, path, Ready())
    return head


def _set(model: Any, path: str, module: nn.Module) -> None:
    """Put a module in place, and copies of the modules on the way to it, so that nobody else's change."""
    *way, last = path.split(".")
    for name in way:
        model._modules[name] = model = _shallow(model._modules[name])
    model._modules[last] = module


def _shallow(module: Any) -> Any:
    # copy.copy goes by what pickles, which a nested model does not
    copied: Any = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._modules = dict(module._modules)
    return copied


def _run_head(head: Any, output: Any, states: torch.Tensor) -> torch.Tensor:
    ready = next(module for module in head.modules() if isinstance(module, Ready))
    ready.output = replace(output, last_hidden_state=states.unsqueeze(0))
    try:
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        logits: torch.Tensor = head(ids, use_cache=False).logits[0]
        return logits
    finally:
        ready.output = None


class _FrozenLinear(nn.Module):
    """A linear with a copy of its weights, in 16 bits where nothing is lost; some rows at a time."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), getattr(linear, "bias", None)
        kinds = [kind for kind in (torch.bfloat16, torch.float16) if _holds(weight, kind)]
        self.kept = weight.to(kinds[0], copy=True) if kinds else weight.clone()
        self.bias = None if bias is None else bias.detach().clone()
        # without numbers: Mamba's forward asks for its type
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.kept.split(max(1, _ROWS // self.kept.shape[-1]))
        product = torch.cat([nn.functional.linear(x, some.to(self.weight.dtype)) for some in rows], -1)
        return product if self.bias is None else product.add_(self.bias)


def _holds(weight: torch.Tensor, kind: torch.dtype) -> bool:
    """Whether a type has room for every weight, to the last bit."""
    rows = max(1, _ROWS // weight.shape[-1])
    return all(torch.equal(some.to(kind).to(some.dtype), some) for some in weight.split(rows))


class KeptStates:
    """A meter (`windows`): a model's states at each position of a text, in a file, and its head."""

    aside = True

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="otaro-eval-")  # noqa: SIM115 (it lives as long as this does)
        self._width = 0
        self._dtype = torch.float32
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None

    def add(self, window: Any, first: int, states: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Keep the states of the positions that follow."""
        assert states is not None
        self._width, self._dtype = states.shape[-1], states.dtype
        self._file.write(states.cpu().contiguous().view(torch.uint8).numpy().tobytes())

    def finish(self, model: SlicedModel) -> None:
        """Keep the head too."""
        self._head = model.frozen_head()

    @torch.inference_mode()
    def logits(self, first: int, count: int, device: torch.device | str) -> torch.Tensor:
        """The logits at `count` positions of the text, from `first` on."""
        assert self._head is not None
        size = self._width * self._dtype.itemsize
        self._file.seek(first * size)
        raw = bytearray(self._file.read(count * size))
        states = torch.frombuffer(raw, dtype=self._dtype).view(-1, self._width)
        return self._head(states.to(device))
