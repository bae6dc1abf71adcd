"""The head and the loss in slices of tokens: the logits of a large vocabulary never exist all at once.

Logits take 4 bytes times tokens times vocabulary, and training holds several of their size: in the type of
the computation and in float32, the log-probabilities, the gradients, the teacher's. Gemma's 262,144 words at
8 x 512 tokens make 4.3 GB of each. Here at most `SLICE_BYTES` of each exist: a slice of tokens goes through
the head, its loss is taken, and its gradient with regard to the hidden states and the head at once, in the
forward pass. The backward pass scales what is there: nothing is computed twice, and the loss is the same sum
in another order.

The seam is transformers' own. A causal model ends with

    logits = self.lm_head(hidden_states)
    loss = self.loss_function(logits, labels, ...)

so for the time of a pass the head hands on its input, and the loss function is one that knows the head: both
run inside the model's forward, where DDP and FSDP expect them. A model that does more between the two (Gemma
2 caps its logits, Granite and Cohere scale them) is found out by a tiny pass (`find`) in which the logits
must arrive as the head made them; it keeps its whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, pad
from transformers.loss.loss_utils import ForCausalLMLoss

from otaro.tune.fake_quant import TuneLinear
from otaro.tune.straight_through import computed_in, is_whole

SLICE_BYTES = 1 << 27  # of a slice's logits in float32
IGNORED = -100

SliceLoss = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


def slice_loss(
    logits: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over the tokens that have a label, with a share of divergence from the teacher;
    and without.
    """
    logits = logits.float()
    plain = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    if teacher is None:
        return plain, plain.detach()
    each = kl_div(
        log_softmax(logits, -1), log_softmax(teacher.float(), -1), reduction="none", log_target=True
    ).sum(-1)
    return (1 - share) * plain + share * each.where(labels != IGNORED, 0.0).sum(), plain.detach()


@dataclass
class Distillation:
    """What a student learns from, beside the labels."""

    share: float
    hidden: torch.Tensor
    """The teacher's hidden states, before the head."""
    plain: torch.Tensor | float = 0.0
    """Then: the cross-entropy alone, summed over the tokens."""
    mixed: torch.Tensor | float = 0.0
    """And the loss, summed likewise."""


class SlicedHead:
    """A causal model whose head is a plain product."""

    def __init__(self, model: Any, head: TuneLinear) -> None:
        self.model, self.head = model, head

    @classmethod
    def find(cls, model: Any, inputs: dict[str, Any]) -> SlicedHead | None:
        """That of a prepared model, where it has one, and these inputs' logits are too large at once."""
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        head, ids = model.get_output_embeddings(), inputs.get("input_ids")
        if (
            not isinstance(head, TuneLinear)
            or ids is None
            or 4 * ids.numel() * head.out_features <= SLICE_BYTES
        ):
            return None
        known = _PLAIN.setdefault(head, {})
        kind = type(head.weight.data)  # sharded or not
        if kind not in known:
            known[kind] = _is_plain(model, head, ids)
        return cls(model, head) if known[kind] else None

    def hidden_states(self) -> AbstractContextManager[None]:
        """Inside, what the model returns as its logits are the hidden states before the head."""
        return _seam(self.model, self.head, lambda hidden: hidden, self.model.loss_function)

    def losses(
        self,
        distillation: Distillation | None = None,
        *,
        total: bool = False,
        of_slice: SliceLoss = slice_loss,
    ) -> AbstractContextManager[None]:
        """Inside, the model's loss is taken in slices; its logits are not to be read.

        As transformers takes it: the mean over labels, or their sum over `num_items_in_batch`; `total`: their
        sum.
        """

        def loss_function(
            logits: torch.Tensor,
            labels: torch.Tensor | None,
            vocab_size: int | None = None,
            num_items_in_batch: Any = None,
            ignore_index: int = IGNORED,
            shift_labels: torch.Tensor | None = None,
            **_: Any,
        ) -> torch.Tensor:
            if shift_labels is None:
                assert labels is not None
                shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
            flat = shift_labels.reshape(-1).to(logits.device)
            flat = flat.where(flat != ignore_index, IGNORED)
            summed = self._summed(logits, flat, distillation, of_slice)
            if total:
                return summed
            items = (flat != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            return summed / (items.to(summed.device) if torch.is_tensor(items) else items)

        return _seam(self.model, self.head, lambda hidden: hidden, loss_function)

    def _summed(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        distillation: Distillation | None,
        of_slice: SliceLoss,
    ) -> torch.Tensor:
        dtype = computed_in(hidden)
        inputs: tuple[torch.Tensor | None, ...]
        weight, bias, share, teacher = self.head.weight_now(dtype), self.head.bias, 0.0, None
        if distillation is not None:
            share, full = distillation.share, self.head.weight.detach().to(dtype)
            taught = distillation.hidden.flatten(0, -2)

            def teacher(rows: slice) -> torch.Tensor:
                return linear(taught[rows], full, bias)

        def loss_of(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            with torch.no_grad():
                theirs = teacher(rows) if teacher is not None else None
            loss, plain = of_slice(logits, theirs, labels[rows], share)
            if distillation is not None:
                distillation.plain, distillation.mixed = (
                    distillation.plain + plain,
                    distillation.mixed + loss.detach(),
                )
            return loss

        inputs = hidden.flatten(0, -2), weight, bias
        if not torch.is_grad_enabled():  # which autograd does not tell the function
            inputs = tuple(part if part is None else part.detach() for part in inputs)
        summed: torch.Tensor = _OverSlices.apply(*inputs, loss_of)  # type: ignore[no-untyped-call]
        return summed


class _OverSlices(torch.autograd.Function):
    """The sum of `loss_of(logits, rows)` over all slices; gradients are taken slice by slice, on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, loss_of: Any
    ) -> torch.Tensor:
        for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        size = max(1, SLICE_BYTES // (4 * len(weight)))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            parts: list[Any] = [
                hidden[rows].detach(),
                weight.detach(),
                None if bias is None else bias.detach(),
            ]
            leaves = [
                part.requires_grad_()
                for part, wanted in zip(parts, ctx.needs_input_grad, strict=False)
                if wanted
            ]
            with torch.set_grad_enabled(bool(leaves)):
                loss = loss_of(linear(*parts), rows)
            total += loss.detach()
            found = iter(torch.autograd.grad(loss, leaves) if leaves else ())
            if of_hidden is not None:
                of_hidden[rows] = next(found)
            if of_weight is not None:
                of_weight += next(found)
            if of_bias is not None:
                of_bias += next(found)
        ctx.gradients = of_hidden, of_weight, of_bias
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return *(None if part is None else part * gradient for part in ctx.gradients), None


_PLAIN: WeakKeyDictionary[TuneLinear, dict[type, bool]] = WeakKeyDictionary()
"""What was found out about heads."""


def _is_plain(model: Any, head: TuneLinear, ids: torch.Tensor) -> bool:
    """Whether logits arrive at the loss as the head made them: seen in a pass of two tokens."""
    loss_function = model.loss_function
    if getattr(loss_function, "_torchdynamo_orig_callable", loss_function) is not ForCausalLMLoss:
        return False
    made: list[torch.Tensor] = []
    arrived: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        made.append(TuneLinear.forward(head, hidden))
        return made[-1]

    def watch(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_whole(head):  # else it was sharded again, and a loss would have nothing to multiply with
            arrived.append(logits)
        return logits.new_zeros(())

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _seam(model, head, forward, watch):
            model(input_ids=ids[:1, :2], labels=ids[:1, :2])
    finally:
        model.train(training)
    return len(made) == len(arrived) == 1 and made[0] is arrived[0]


@contextmanager
def _seam(
    model: Any, head: TuneLinear, forward: Callable[..., Any], loss_function: Callable[..., Any]
) -> Iterator[None]:
    """For the time of a pass, another forward of the head and another loss."""
    own = model.__dict__.get("_loss_function")
    object.__setattr__(head, "forward", forward)
    model.loss_function = loss_function
    try:
        yield
    finally:
        del head.__dict__["forward"], model._loss_function
        if own is not None:
            model.loss_function = own
