"""The held-out data of a tuning run: what perplexities are measured on, and what decides how a run ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from otaro.cli import console
from otaro.tune import processes

if TYPE_CHECKING:
    import torch

    from otaro.sefp.precision import Precision
    from otaro.tune.data import TokenDataset

BATCH_TOKENS = 4_096
FEW_TOKENS = 1_000  # on which perplexity is mostly chance


class HeldOut:
    """The first examples of a data set, as many as `most` tokens allow, one at least, in batches."""

    def __init__(
        self, dataset: TokenDataset, most: int, collate: Callable[[list[Any]], Any], dtype: torch.dtype | None
    ) -> None:
        """With a `dtype` losses are measured under autocast."""
        examples: list[dict[str, list[int]]] = []
        tokens = 0
        for example in (dataset[i] for i in range(len(dataset))):
            tokens += len(example["input_ids"])
            if examples and tokens > most:
                break
            examples.append(example)
        lengths = [len(example["input_ids"]) for example in examples]
        self.tokens, self.longest = sum(lengths), max(lengths)
        size = max(1, BATCH_TOKENS // self.longest)
        self._batches = [collate(examples[i : i + size]) for i in range(0, len(examples), size)]
        self._dtype = dtype

    def losses(self, trainer: Any, precisions: Sequence[Precision | None], title: str) -> list[float]:
        """Mean loss per token at each precision, the same in all processes; each takes a part of the data."""
        from otaro.tune.trainer import losses_by_precision, reshard

        ours = self._batches[processes.rank() :: processes.size()]
        # FSDP wants as many passes of all: one that counts nothing
        if len(ours) * processes.size() < len(self._batches):
            first = self._batches[0]
            ours.append({**first, "labels": first["labels"].new_full(first["labels"].shape, -100)})
        counted = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in ours)
        means = []
        with console.progress_bar(title) as progress:
            for number, precision in enumerate(precisions):
                progress(str(precision or "full precision"), number, len(precisions))
                model, precisely = trainer.model, trainer.precisely
                (loss,) = losses_by_precision(model, precisely, [precision], ours, self._dtype)
                parts = processes.together((loss * counted, counted))
                means.append(sum(total for total, _ in parts) / max(sum(tokens for _, tokens in parts), 1))
        reshard(trainer.model)
        return means

    def loss(self, model: Any) -> float:
        """Mean loss per token of a model that is not quantized here, by this process alone."""
        from otaro.tune.fake_quant import Precisely
        from otaro.tune.trainer import losses_by_precision

        return losses_by_precision(model, Precisely(), [None], self._batches, self._dtype)[0]
