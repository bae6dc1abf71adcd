"""What is packed: one rule, which packing, loading and tuning all ask.

A model's weights are packed where a product or a look-up reads them: every linear (fused projections are
plain linears), the convolutions of GPT-2, which are linears stored as [in, out], the token embedding, the
head, and the fused stacks of experts. Everything else stays as it is: norms, biases, routers, positions, and
modules of classes that do more than these.

The rule is asked of the module tree, whether it was built on the meta device, loaded, or wrapped by peft.
Classes are matched exactly, as a subclass may do more in its forward, which a packed stand-in would lose.
Only embeddings are asked what they do: Gemma's multiplies its rows by a number.
"""

from __future__ import annotations

import copy
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import nn

from otaro.errors import CheckpointError

EXPERT_STACKS = ("gate_up_proj", "down_proj")


class Kind(StrEnum):
    """How a packed tensor is read."""

    LINEAR = "linear"
    HEAD = "head"
    CONV1D = "conv1d"
    """GPT-2's: x @ W + b with W as [in, out]. Groups run along the input, so its transpose is packed."""
    EMBEDDING = "embedding"
    EXPERTS = "experts"


class Packable(NamedTuple):
    """A tensor to pack, and the module that reads it."""

    path: str
    parameter: str
    kind: Kind
    module: Any

    @property
    def name(self) -> str:
        """Of the parameter, as a state dict has it."""
        return f"{self.path}.{self.parameter}" if self.path else self.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """As packed: inputs come last."""
        shape: torch.Size = getattr(self.module, self.parameter).shape
        return tuple(reversed(shape)) if self.kind is Kind.CONV1D else tuple(shape)


def packable(model: Any) -> list[Packable]:
    """The tensors of a model to pack, in the order of its modules; tied ones appear under each of their
    names.

    A tensor that any other module has as well stays as it is: a head that is tied to an odd embedding does.
    Refuses experts that cannot be read one after the other.
    """
    tables = {id(table.weight) for table in token_embeddings(model)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found, kept = [], set()
    for path, module in model.named_modules():
        kinds = _kinds(path, module, id(module._parameters.get("weight")) in tables, module is head)
        found += [Packable(path, parameter, kind, module) for parameter, kind in kinds.items()]
        kept |= {id(tensor) for name, tensor in module._parameters.items() if name not in kinds}
    return [one for one in found if id(getattr(one.module, one.parameter)) not in kept]


def _kinds(path: str, module: nn.Module, is_table: bool, is_head: bool) -> dict[str, Kind]:
    """Which parameters of one module are packed."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return {"weight": Kind.HEAD if is_head else Kind.LINEAR}
    if type(module) is Conv1D:
        return {"weight": Kind.CONV1D}
    if is_table and isinstance(module, nn.Embedding):
        return {} if embedding_scale(module) is None else {"weight": Kind.EMBEDDING}
    stacks = {stack: Kind.EXPERTS for stack in EXPERT_STACKS if module._parameters.get(stack) is not None}
    # Set by transformers for experts whose plain forward takes one after the other, as packed ones are run.
    if stacks and (transposed := getattr(module, "is_transposed", None)) is not False:
        kept = "kept in a form of its own" if transposed is None else "stored as [in, out]"
        raise CheckpointError(f"{path}: expert weights {kept} ({type(module).__name__}) are not supported")
    return stacks


def token_embeddings(model: Any) -> list[nn.Embedding]:
    """The token embedding; with peft's `modules_to_save` also the copies of it that are tuned."""
    found = getattr(model, "get_input_embeddings", lambda: None)()
    return (
        [module for module in found.modules() if isinstance(module, nn.Embedding)]
        if found is not None
        else []
    )


@torch.no_grad()
def embedding_scale(table: nn.Embedding) -> float | None:
    """What an embedding multiplies its rows by, 1 for a plain one; None where it does anything else.

    Asked of the forward itself, on rows of our own, in bfloat16: a scale that is not rounded first gives
    other bits.
    """
    if type(table) is nn.Embedding:
        return 1.0
    stated = getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", None))
    if not isinstance(stated, int | float) or table._modules or table._parameters.keys() != {"weight"}:
        return None
    scale = torch.tensor(float(stated), dtype=torch.float32, device="cpu")
    rows = torch.arange(1, 257, dtype=torch.bfloat16, device="cpu").div_(7).view(4, 64)
    probe = copy.copy(table)
    probe.padding_idx = None
    probe._parameters = {"weight": nn.Parameter(rows)}
    probe._buffers = dict.fromkeys(table._buffers, scale)
    looked_up = type(table).forward(probe, torch.arange(4, device="cpu"))
    return float(scale) if torch.equal(looked_up, scaled(rows, float(scale))) else None


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of an embedding times its scale, which is rounded to their type first."""
    return rows if scale == 1 else rows * torch.full((), scale, dtype=rows.dtype, device=rows.device)
