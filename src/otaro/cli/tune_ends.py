"""A tuning run that ends early says what is kept: by a signal, for lack of memory or of space, by a library's
refusal.
"""

from __future__ import annotations

import errno
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from otaro.cli import console
from otaro.errors import OtaroError, TargetError, brief
from otaro.tune import processes

if TYPE_CHECKING:
    from otaro.cli.tune_run import TuningRun

LESS_MEMORY = (
    "try a smaller --batch-size with more --grad-accum, --gradient-checkpointing, --optimizer adamw8bit, "
    "--lora 16, "
    "or several GPUs: torchrun --nproc_per_node N -m otaro tune ... --fsdp"
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CUT_OFF = "inline_container|PytorchStreamWriter"
"""What torch says where a file of its own could not be written to its end; it tells no cause."""


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
    """End in one sentence where memory or space ran out, or another process of the run was killed."""
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except TargetError as error:
        if isinstance(error.__cause__, OSError) and _no_room(error.__cause__):
            raise TargetError(f"{error}; {run.kept()}") from error
        raise
    except (OSError, SafetensorError) as error:
        if (refused := _no_room(error)) is None:
            raise
        raise TargetError(f"{_as_told(run.out, refused)}; {run.kept()}") from error
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
        if re.search(_CUT_OFF, said):
            why = (
                f"cannot write {run.out}: a checkpoint could not be written to its end, for lack of space "
                "perhaps; free some space or choose another place"
            )
            raise TargetError(f"{why}; {run.kept()}") from error
        raise


def _no_room(error: Exception) -> OSError | None:
    """The system's refusal for lack of space, if it is one; safetensors gives it as text."""
    if isinstance(error, OSError):
        return error if error.errno in _NO_ROOM else None
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), str(error)) if code and int(code[1]) in _NO_ROOM else None


def _as_told(out: Path, refused: OSError) -> str:
    """A refusal in the words that all commands have."""
    from otaro.file.atomic import explained as worded_refusal

    try:
        with worded_refusal(out):
            raise OSError(refused.errno, refused.strerror)  # without a name: wherever in the folder it was
    except TargetError as told:
        return str(told)


@contextmanager
def worded() -> Iterator[None]:
    """Other libraries' refusals of a setting, in one line."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        if isinstance(error, OtaroError):
            raise
        raise OtaroError(f"this run cannot be set up: {brief(error)}") from error
