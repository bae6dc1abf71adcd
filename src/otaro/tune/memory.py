"""What a tuning run will take of its device's memory, told before it is taken.

Most of it is known exactly from the weights: bytes of the weights, their gradients, the optimizer's state and
the copies that options keep. Activations are estimated from the model's dimensions, as a decoder layer of the
common kind keeps them (sdpa or flash attention, a gated feed-forward); the estimate is meant to be within a
fifth, as tests check and `benchmarks/results/h200-memory.txt` shows.

From the estimate follows where things are kept (`Plan`): copies that a step touches once go to host memory
where the device has no room for them, and the quantized weights are then made again in the backward pass
instead of held. Neither changes a bit of the result. A run whose weights, gradients and optimizer alone are
more than the device has cannot work, and is refused; else the numbers are told, and the user may try.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.packable import EXPERT_STACKS, token_embeddings
from otaro.readable import size
from otaro.tune.config import Options
from otaro.tune.sliced import SLICE_BYTES
from otaro.tune.steady import goes_back

STATE_BYTES: Mapping[str, int] = {"adamw": 8, "adamw8bit": 2, "sgd": 0}
"""Of an optimizer, for each weight."""
ROOM = 0.92
"""Of a device's memory that a plan fills: the rest goes to the context, to what is cut off and to the error
of the estimate.
"""


class MemoryNeedError(OtaroError):
    """A run that cannot fit."""


@dataclass(frozen=True)
class Batch:
    """What a step computes on one device."""

    sequences: int
    length: int
    bf16: bool
    checkpointing: bool = False
    """Whether activations within a layer are made again in the backward pass."""

    @property
    def tokens(self) -> int:
        """In all sequences."""
        return self.sequences * self.length

    @property
    def width(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.bf16 else 4


@dataclass(frozen=True)
class Needs:
    """Bytes, by what they are for; on one device."""

    weights: int
    gradients: int
    optimizer: int
    quantized: int
    """Weights held quantized for a step."""
    l2_sp: int
    average: int
    delayed: int
    """Gradients that the method `otaro` holds back."""
    activations: int
    loss: int
    """Logits of a slice, the head's quantized weight, and its gradient."""

    @property
    def certain(self) -> int:
        """Without which there is no step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def copied(self) -> dict[str, int]:
        """Of what a step touches once, by flag."""
        return {"--l2-sp": self.l2_sp, "--average": self.average}

    @property
    def copies(self) -> int:
        """Of that in all."""
        return sum(self.copied.values())

    @property
    def total(self) -> int:
        """Of all."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        told = ", ".join(
            f"{name} {size(count)}" for name, count in parts.items() if count >= self.total / 200
        )
        return f"{size(self.total)} ({told.replace('_', '-')})"


@dataclass(frozen=True)
class Run:
    """What is tuned, and how."""

    model: Any
    options: Options
    optimizer: str
    """adamw, adamw8bit or sgd."""
    batch: Batch
    shards: int = 1
    """Processes that FSDP spreads the weights over."""

    @property
    def lora(self) -> bool:
        """Whether adapters are what is tuned."""
        return any("lora_" in name for name, _ in self.model.named_parameters())

    def needs(self) -> Needs:
        """Of one process."""
        parameters = dict(self.model.named_parameters())
        tuned = {name: p for name, p in parameters.items() if p.requires_grad}
        count, gradients = (
            sum(p.numel() for p in tuned.values()),
            sum(p.nbytes for p in tuned.values()) // self.shards,
        )
        tables = {id(table.weight) for table in token_embeddings(self.model)}
        rows = tables - {id(head_weight(self.model))}  # looked up, never held
        held = sum(
            p.numel()
            for name, p in tuned.items()
            if p.dim() > 1 and "lora_" not in name and id(p) not in rows
        )
        states = STATE_BYTES[self.optimizer] * count
        if self.optimizer == "adamw8bit":  # bitsandbytes leaves embeddings in float32
            states += 6 * sum(p.numel() for name, p in tuned.items() if "embed" in name)
        options = self.options
        return Needs(
            weights=sum(p.nbytes for p in parameters.values()) // self.shards,
            gradients=gradients,
            optimizer=states // self.shards,
            quantized=self.batch.width * held if options.method != "fp" and self.shards == 1 else 0,
            l2_sp=sum(p.nbytes for name, p in tuned.items() if goes_back(name)) // self.shards
            if options.l2_sp
            else 0,
            average=4 * count // self.shards if options.average else 0,
            delayed=gradients if options.method == "otaro" and options.accumulator == "device" else 0,
            activations=activation_bytes(self.model, self.batch),
            loss=_loss_bytes(self.model, self.batch),
        )

    def plan(self, device: torch.device, room: int | None = None) -> Plan:
        """Fill the device as far as it goes. `room` is asked of the device if it is not given."""
        needed, room = self.needs(), device_bytes(device) if room is None else room
        # else there is nothing to move, or no other place
        host = device.type != "cpu" and bool(needed.copies)
        plans = [
            Plan(self, needed, room, device, hold, on_host)
            for hold, on_host in ((True, False), (True, host), (False, host))
        ]
        return next((plan for plan in plans if plan.fits), plans[-1])


def activation_bytes(model: Any, batch: Batch) -> int:
    """What a forward pass keeps for the backward pass, without logits."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    feed_forward = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    if any(stack in name for stack in EXPERT_STACKS for name, p in model.named_parameters() if p.dim() == 3):
        feed_forward = experts * (getattr(config, "moe_intermediate_size", None) or feed_forward)
    width = batch.width
    # Residual stream and two norms in float32; inputs and outputs of attention; gate, its activation, up, and
    # their product.
    of_layer = batch.tokens * (hidden * (17 + 2.5 * width) + feed_forward * 4 * width)
    if batch.checkpointing:
        return int(of_layer + layers * batch.tokens * hidden * 4)
    return int(layers * of_layer)


def _loss_bytes(model: Any, batch: Batch) -> int:
    """Half a dozen tensors of a slice's size, the head's quantized weight, and its gradient."""
    if (weight := head_weight(model)) is None:
        return 0
    slices = 6 * min(SLICE_BYTES, 4 * batch.tokens * len(weight))
    return slices + weight.numel() * (batch.width + (4 if weight.requires_grad else 0))


def head_weight(model: Any) -> torch.Tensor | None:
    """What hidden states are multiplied with to give logits."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(head, "weight", None)


@dataclass(frozen=True)
class Plan:
    """What a run needs, and where it keeps what."""

    run: Run
    needs: Needs
    room: int | None
    """Bytes that the device has in all; None where nobody knows."""
    device: torch.device
    hold: bool
    """Whether quantized weights are held for a step."""
    copies_on_host: bool
    """Whether --l2-sp and --average keep theirs in host memory."""

    @property
    def on_device(self) -> int:
        """Bytes, as planned."""
        moved = self.needs.copies if self.copies_on_host else 0
        return self.needs.total - moved - (0 if self.hold else self.needs.quantized)

    @property
    def fits(self) -> bool:
        """As far as can be told beforehand."""
        return self.room is None or self.on_device <= ROOM * self.room

    def __str__(self) -> str:
        """For people; refuses nothing."""
        has = "" if self.room is None else f"; {self.device} has {size(self.room)}"
        sentences = [f"memory: about {self.needs}{has}"]
        if self.copies_on_host:
            kept = " and ".join(flag for flag, count in self.needs.copied.items() if count)
            sentences.append(f"the copies of {kept} are kept in host memory, as the device has no room")
        if not self.hold and self.needs.quantized:
            sentences.append("quantized weights are made twice a step instead of held")
        if not self.fits:
            sentences.append(f"this will probably not fit; {self.advice()}")
        return ". ".join(sentences)

    def check(self) -> None:
        """Refuse what cannot work."""
        if self.room is not None and self.needs.certain > self.room:
            raise MemoryNeedError(
                f"weights, gradients and optimizer alone take {size(self.needs.certain)}, and {self.device} "
                "has "
                f"{size(self.room)}; {self.advice()}"
            )

    def advice(self) -> str:
        """What takes less, and how much."""
        needed, ways = self.needs, []
        if not self.run.lora:
            count = sum(p.numel() for p in self.run.model.parameters())
            ways.append(
                f"--lora 16 (about {size(2 * count + needed.activations + needed.loss)} of bfloat16 weights)"
            )
            if self.run.optimizer == "adamw":
                ways.append(f"--optimizer adamw8bit (saves {size(0.75 * needed.optimizer)})")
        if needed.activations > needed.total / 20:
            ways.append("--gradient-checkpointing or a smaller --batch-size (with --grad-accum)")
        if not self.copies_on_host and needed.copies:
            off = " ".join(f"{flag} 0" for flag, count in needed.copied.items() if count)
            ways.append(f"{off} (saves {size(needed.copies)})")
        if self.run.shards == 1 and not self.run.lora and self.room is not None and self.device.type != "cpu":
            each = ROOM * self.room - needed.activations - needed.loss
            if each > 0:
                ways.append(
                    f"FSDP over {max(2, math.ceil((needed.total - needed.quantized) / each))} such GPUs"
                )
        return "what takes less: " + "; ".join(ways) if ways else "take a smaller model"


def device_bytes(device: torch.device) -> int | None:
    """All memory of a device; of the CPU, what the machine or its container lets a process have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    stated = limit.read_text().strip() if limit.is_file() else "max"
    return min(machine, int(stated)) if stated.isdecimal() else machine
