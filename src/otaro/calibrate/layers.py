"""A model run layer by layer from disk.

Only one layer's weights are in memory at a time. What is outside of the layers (embedding, positions, norms)
runs once with stand-ins in the layers' places: they note with which masks and angles each layer is called,
and that the hidden states come first. Then a layer is read, run over all windows, and dropped.

A matrix is known by the place of its weight in memory, so that linears, the convolutions of GPT-2 and the
experts of a stack are all seen in the same way: by the product that reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from otaro.errors import OtaroError, brief
from otaro.file.checkpoint import Checkpoint
from otaro.packable import Kind, packable

FIRST_TOKEN = 64.0
"""What the first token of a window counts: all others attend to it, most of them more than to anything else.
It is one of hundreds, so that without this a matrix would make its errors where the first token is, and pass
for good.
"""


class Matrix(NamedTuple):
    """A packed matrix of a layer, or one expert's of a stack."""

    name: str
    expert: int | None = None


class Inputs:
    """What a matrix was multiplied with: the Gram matrix of its inputs, and how many there were."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.gram = torch.zeros(width, width, device=device)
        self.count = 0
        self.readers: list[Matrix] = []

    def add(self, x: torch.Tensor) -> None:
        """Inputs of some tokens, or of whole windows [windows, tokens, width]."""
        self.count += x.numel() // x.shape[-1]
        if x.dim() == 3:
            x = torch.cat([x[:, :1] * FIRST_TOKEN**0.5, x[:, 1:]], 1)
        rows = x.reshape(-1, x.shape[-1])
        self.gram.addmm_(rows.T, rows)


class Skeleton:
    """A model without the weights of its layers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        self._checkpoint, self._device = checkpoint, device
        config = copy.deepcopy(checkpoint.config)
        config.dtype = torch.float32
        # buffers, angles for example, are computed and not stored
        with init_empty_weights(include_buffers=False):
            self.model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        self.model.eval()
        self.rule = {one.name: one for one in packable(self.model)}
        self.prefix, self._layers = self._find_layers()
        self._stands = [_Stand(layer) for layer in self._layers]
        parent, _, last = self.prefix.rpartition(".")
        setattr(self.model.get_submodule(parent), last, nn.ModuleList(self._stands))
        self._head = self.model.get_output_embeddings()
        self._catch = _Catch()
        self.model.set_output_embeddings(self._catch)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def head(self) -> str | None:
        """The stored name of the head's weight, if it is packed: the embedding's where they are tied."""
        name = next((name for name, one in self.rule.items() if one.module is self._head), None)
        return None if name is None else self._checkpoint.tied.get(name, name)

    def start(self, ids: torch.Tensor, batch: int) -> torch.Tensor:
        """Read what is outside of the layers; returns what enters the first, [windows, tokens, width]."""
        table = self.model.get_input_embeddings()
        used, ids = ids.unique(return_inverse=True)
        whole = self._name_of(table.weight)
        for name, parameter in list(self.model.named_parameters()):
            if parameter is not table.weight:
                self._place(self.model, name, self._checkpoint.read(self._checkpoint.tied.get(name, name)))
        for name, _ in list(self.model.named_buffers()):
            if name in self._checkpoint.shapes:
                self._place(self.model, name, self._checkpoint.read(name))
        rows, first = [], 0
        for some in self._checkpoint.rows(whole, 4096):
            here = used[(used >= first) & (used < first + len(some))]
            rows.append(some[here - first].float())
            first += len(some)
        self._place(self.model, whole, torch.cat(rows))
        self.model.to(self._device)
        states = [self._outside(some) for some in ids.split(batch)]
        return torch.cat(states)

    def _outside(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model with stand-ins; they keep what each layer is called with, by number of windows."""
        try:
            self.model(input_ids=ids.to(self._device), use_cache=False)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise OtaroError(
                f"{self._checkpoint.config.model_type} models cannot be calibrated: they do not run layer "
                "by layer "
                f"({brief(error)}); pack without --calibrate"
            ) from error
        first = self._stands[0].seen
        if first is None or any(len(ids) not in stand.calls for stand in self._stands):
            raise OtaroError(
                f"{self._checkpoint.config.model_type} models cannot be calibrated: not all of their layers "
                "are run one after "
                "the other; pack without --calibrate"
            )
        return first.cpu()

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """One layer with its weights, float32, to be dropped afterwards."""
        layer = copy.deepcopy(self._layers[number])
        prefix = f"{self.prefix}.{number}."
        for name in layer.state_dict():
            self._place(layer, name, self._checkpoint.read(prefix + name))
        yield layer.to(self._device)

    def run(self, layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of some windows after a layer."""
        args, kwargs = self._stands[number].calls[len(states)]
        found = layer(states.to(self._device), *args, **kwargs)
        after: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return after.cpu()

    def before_head(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads, by the hidden states after the last layer."""
        self._stands[-1].instead = states.to(self._device)
        self.model(
            input_ids=torch.zeros(states.shape[:2], dtype=torch.long, device=self._device), use_cache=False
        )
        return self._catch.seen

    def matrices(self, number: int) -> dict[str, Kind]:
        """Packed tensors of a layer, by their names inside of it."""
        prefix = f"{self.prefix}.{number}."
        return {
            name.removeprefix(prefix): one.kind for name, one in self.rule.items() if name.startswith(prefix)
        }

    def _find_layers(self) -> tuple[str, list[nn.Module]]:
        wanted = self.model.config.get_text_config().num_hidden_layers
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == wanted:
                return name, list(module)
        raise OtaroError(
            f"{self._checkpoint.config.model_type} models cannot be calibrated: no list of layers is found "
            "in them; "
            "pack without --calibrate"
        )

    def _name_of(self, weight: torch.Tensor) -> str:
        name: str = next(name for name, parameter in self.model.named_parameters() if parameter is weight)
        return name

    @staticmethod
    def _place(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        if last in owner._parameters:
            owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[last] = tensor


class _Stand(nn.Module):
    """In place of a layer: hands the hidden states on, and keeps with what else it was called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a submodule: it has no weights now
        self.calls: dict[int, tuple[Any, Any]] = {}
        self.seen: torch.Tensor | None = None
        self.instead: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # models ask layers which kind of attention they have
            return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen = hidden_states
        self.calls[len(hidden_states)] = args, kwargs
        return hidden_states if self.instead is None else self.instead


class _Catch(nn.Module):
    """In place of the head: keeps what it would have read."""

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x


class Watch(TorchFunctionMode):
    """While it is on, the inputs of all products with the given weights are added up."""

    def __init__(self, weights: Mapping[str, torch.Tensor], kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        self.inputs: dict[Matrix, Inputs] = {}
        self._known: dict[int, Matrix] = {}
        self._last: tuple[torch.Tensor, Inputs] | None = None
        for name, kind in kinds.items():
            stack = weights[name] if kind is Kind.EXPERTS else weights[name].unsqueeze(0)
            for number, one in enumerate(stack):
                self._known[one.data_ptr()] = Matrix(name, number if kind is Kind.EXPERTS else None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear or func is torch.addmm:
            # GPT-2: addmm(bias, x, weight)
            x, weight = args[:2] if func is nn.functional.linear else args[1:3]
            if (matrix := self._known.get(weight.data_ptr())) is not None:
                self._add(matrix, x)
        return func(*args, **(kwargs or {}))

    def _add(self, matrix: Matrix, x: torch.Tensor) -> None:
        """Matrices that read the same tensor, as query, key and value do, share its Gram matrix."""
        if self._last is not None and self._last[0] is x:
            shared = self._last[1]
            if matrix not in self.inputs:
                self.inputs[matrix] = shared
                shared.readers.append(matrix)
            if self.inputs[matrix] is shared:
                return
        inputs = self.inputs.get(matrix)
        if inputs is None:
            inputs = self.inputs[matrix] = Inputs(x.shape[-1], x.device)
            inputs.readers.append(matrix)
        inputs.add(x)
        self._last = (x, inputs)
