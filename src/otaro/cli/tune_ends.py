"""A tuning run that ends early, by a signal, a lack of memory, a library's refusal, says what is kept."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from otaro.cli import console
from otaro.errors import OtaroError, brief
from otaro.tune import processes

if TYPE_CHECKING:
    from otaro.cli.tune_run import TuningRun

LESS_MEMORY = (
    "try a smaller --batch-size with more --grad-accum, --gradient-checkpointing, --optimizer adamw8bit, "
    "--lora 16, "
    "or several GPUs: torchrun --nproc_per_node N -m otaro tune ... --fsdp"
)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def interruptible(run: TuningRun) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM say what is kept; of several processes the first does."""
    if not processes.is_first():
        yield  # the launcher ends them
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    catching = threading.current_thread() is threading.main_thread()  # no other may
    usual = (
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if catching else {}
    )
    try:
        if catching:
            signal.signal(signal.SIGTERM, terminate)
        yield
    except KeyboardInterrupt as end:
        for number in usual:
            signal.signal(number, signal.SIG_IGN)  # a second one must not cut the word short
        console.err.print(f"[bold]interrupted:[/] {console.escape(run.kept())}", highlight=False)
        raise typer.Exit(128 + (signal.SIGTERM if isinstance(end, _Terminated) else signal.SIGINT)) from None
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def explained(run: TuningRun) -> Iterator[None]:
    """End in one sentence where memory ran out, or another process of the run was killed."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in said:
            raise OtaroError(f"out of memory; {LESS_MEMORY}; {run.kept()}") from error
        if processes.size() > 1 and re.search("Connection (closed|reset) by peer|NCCL|gloo", said):
            why = (
                f"the processes of this run lost each other ({brief(error)}); one was ended perhaps, for "
                "lack of memory"
            )
            raise OtaroError(f"{why}; {run.kept()}") from error
        raise


@contextmanager
def worded() -> Iterator[None]:
    """Other libraries' refusals of a setting, in one line."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        if isinstance(error, OtaroError):
            raise
        raise OtaroError(f"this run cannot be set up: {brief(error)}") from error
