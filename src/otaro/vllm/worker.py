"""What vLLM's workers are asked by `collective_rpc`: to have the planes of a precision, and to run at it.

A switch writes one integer into every layer. Compiled graphs and those of CUDA have read it already, so an
engine that is to switch runs without them.

Refusals are returned in words: where several workers raise, vLLM reads the answer of one alone, and takes
that of the next for the answer to whatever is asked next.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from otaro.errors import OtaroError
from otaro.sefp.precision import Precision
from otaro.vllm.shares import Shares


def reach_precision(worker: Any, precision: str) -> str:
    """Map a precision's planes, or copy them to the device. Returns its name, or why it cannot be had."""
    try:
        chosen, layers = Precision(precision), _layers(worker)
        layers[0].require(chosen)
        for layer in layers:
            layer.reach(chosen)
        return str(chosen)
    except OtaroError as refusal:
        return str(refusal)


def set_precision(worker: Any, precision: str) -> str:
    """Run at a precision from the next step on. Returns its name, or why not: then nothing has changed.

    `otaro.vllm.set_precision` asks all workers and resets the prefix cache.
    """
    reached = reach_precision(worker, precision)
    if reached == precision.upper():
        for layer in _layers(worker):
            layer.bits = Precision(precision).mantissa_bits
    return reached


def _layers(worker: Any) -> list[Shares]:
    found = [module for module in worker.get_model().modules() if isinstance(module, Shares)]
    if not found:
        raise OtaroError("this model has no precision to switch; serve a directory that `otaro pack` wrote")
    if not worker.model_config.enforce_eager:
        raise OtaroError(
            "vLLM has compiled the model at one precision; start it with --enforce-eager to switch"
        )
    return found


def register() -> None:
    """Let every kind of worker be asked."""
    WorkerBase.reach_precision, WorkerBase.set_precision = reach_precision, set_precision
