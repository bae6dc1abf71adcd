"""Several processes, one run: who they are, which of them speaks, and how they wait for each other.

torchrun and `accelerate launch` start one command several times and tell each process its number in its
environment. The first writes files, logs and prints; the others are mute. What only one may do, or what may
differ between two who look at different times (is the folder empty?), the first does and hands on:
`from_first`. It goes through gloo and waits for days, since the first may download, measure or pack for long,
while a GPU's own messages give up after half an hour.

An error is said once: by the first process to meet one, whichever it is (`may_speak`). It then ends, and the
launcher ends the others. Outside of a launcher there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from otaro.errors import OtaroError

T = TypeVar("T")

PATIENCE = timedelta(days=7)
GRACE = 10.0  # seconds in which a launcher ends the others after the first has ended
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

# the group to wait in and the store to speak through, once the processes have met
_joined: dict[str, Any] = {}


def size() -> int:
    """How many processes the launcher started; one without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """The number of this one, from 0."""
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return rank() == 0


def launcher() -> str:
    """The command that started these processes, up to the arguments of our own: `torchrun --nproc_per_node 2
    -m otaro`.

    It is the parent's, where the system shows one that ends as ours does; else the environment tells its
    name.
    """
    if size() == 1:
        return "otaro"
    words, ours = _command_of(os.getppid()), sys.argv[1:]
    if ours and words[-len(ours) :] == ours:
        if (script := Path(words[1])).is_absolute():  # the system has put its interpreter in front
            words[:2] = [script.name if shutil.which(script.name) == words[1] else words[1]]
        return shlex.join(words[: -len(ours)])
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    return (
        f"{'accelerate launch --num_processes' if by_accelerate else 'torchrun --nproc_per_node'} "
        f"{size()} -m otaro"
    )


def _command_of(pid: int) -> list[str]:
    """As it was typed; empty where the system does not show it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, ValueError):
        return []


def mute_others() -> None:
    """Only the first process is heard from now on."""
    if not is_first():
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 # until the process ends
        warnings.simplefilter("ignore")


def may_speak() -> bool:
    """Whether this process, which met an error, is the one to say so: the first to ask, once they met."""
    if "store" in _joined:
        try:
            chosen = bool(_joined["store"].add("otaro spoken", 1) == 1)
        except RuntimeError:  # whoever kept the store has spoken and ended
            chosen = False
    elif not (chosen := is_first()):
        # before they have met all come to the same end, and the first will say so; unless it did not
        time.sleep(GRACE)
        chosen = True
    if chosen and not is_first():
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return chosen


def on_cpu() -> bool:
    """Whether the run computes on the CPU: there is no other device, or none that processes can share."""
    return _accelerator() is None


def _accelerator() -> Any:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is not None and device.type == "mps" and size() > 1 else device


def join() -> None:
    """Let all processes of the run meet; accelerate finds the group and takes it as its own."""
    if size() == 1:
        if mpi := next((name for name in _MPI_SIZES if int(os.environ.get(name, 1)) > 1), None):
            raise OtaroError(
                f"{mpi} is set: these are processes of mpirun, which cannot be made one run; use torchrun"
            )
        return
    if _joined:
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    if not distributed.is_available():
        raise OtaroError(
            "this build of torch cannot run several processes; start one, without torchrun or "
            "accelerate launch"
        )
    backend = "gloo"
    if (device := _accelerator()) is not None:
        here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.accelerator.device_count()
        if here > devices:
            raise OtaroError(
                f"{here} processes cannot share {devices} GPU(s); start as many as there are: "
                f"--nproc_per_node {devices}"
            )
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    if not distributed.is_initialized():
        store, number, count = next(rendezvous("env://"))
        _joined["store"] = store
        distributed.init_process_group(backend, store=_joined["store"], rank=number, world_size=count)
    _joined["group"] = distributed.new_group(backend="gloo", timeout=PATIENCE)


def wait() -> None:
    """For all processes."""
    if _joined:
        from torch import distributed

        distributed.barrier(_joined["group"])


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them."""
    made: list[Any] = [make() if is_first() else None]
    if _joined:
        from torch import distributed

        distributed.broadcast_object_list(made, src=0, group=_joined["group"])
    value: T = made[0]
    return value


def together(value: Any) -> list[Any]:
    """What each process brings, in all of them."""
    if not _joined:
        return [value]
    from torch import distributed

    brought: list[Any] = [None] * size()
    distributed.all_gather_object(brought, value, group=_joined["group"])
    return brought


def leave() -> None:
    """Part, when the run is over."""
    from torch import distributed

    if _joined:
        wait()  # none goes while another still has something to say
        _joined.clear()
    # by accelerate, where a launcher started one process
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
