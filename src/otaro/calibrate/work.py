"""The folder beside the target where finished layers wait, so that a calibration that was stopped goes on
where it was.

    state.json             a digest of model, text and settings: another one, and the folder is begun anew
    states-0, states-1     hidden states before the layer at hand, and after it; they take turns
    part-00000 ...         the packed tensors of a layer, and norms that were changed; the last is the head

A part is put in place when the states after it are on disk, so the number of parts says where to go on. It
has a digest of these states: where they are others now, everything begins anew. The room for the states is
taken before anything is computed, as memory that is mapped to a file and finds the disk full ends the
process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from otaro.errors import OtaroError, OtaroWarning, TargetError
from otaro.file.atomic import explained, flush, write_text
from otaro.file.io import PackedRows
from otaro.file.planes import PLANES
from otaro.sefp.codec import SefpTensor

_STORED = "stored"  # of a tensor that is not packed, but changed


@dataclass(frozen=True)
class Tensor:
    """A packed tensor of a part."""

    codes: SefpTensor
    zeros: int


class Work:
    """Parts and states of one calibration."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder = folder
        self.done = 0
        """Parts that are finished."""
        self._digest = digest

    def begin(self, states: torch.Tensor) -> None:
        """Go on after the last finished part, or begin anew with the hidden states before the first layer."""
        state, wanted = self.folder / "state.json", {"digest": self._digest}
        if _read(state) == wanted:
            while self._part(self.done).is_file():
                self.done += 1
        if self.done and not self._states_fit():
            warnings.warn(
                f"the hidden states in {self.folder} are not those of its last finished layer; everything "
                "was begun anew",
                OtaroWarning,
                stacklevel=2,
            )
            self.done = 0
        if not self.done:
            self.remove()
            write_text(state, json.dumps(wanted) + "\n")
        with explained(self.folder):
            for number in (0, 1):
                _reserve(self._states(number), states.numel() * states.element_size())
        if not self.done:
            self.states(0, states.shape).copy_(states)

    def states(self, number: int, shape: Sequence[int]) -> torch.Tensor:
        """Hidden states before the layer of that number, in a file."""
        size = int(torch.Size(shape).numel())
        with explained(self.folder):
            return torch.from_file(str(self._states(number)), shared=True, size=size).view(*shape)

    def finish(
        self,
        tensors: Mapping[str, Tensor],
        changed: Mapping[str, torch.Tensor],
        plain: Sequence[str],
        after: torch.Tensor | None = None,
    ) -> None:
        """Write the next part; `plain` names what was not calibrated, `after` are the next one's states."""
        data, about = {f"{name}|{_STORED}": tensor.contiguous() for name, tensor in changed.items()}, {}
        for name, tensor in tensors.items():
            rows = PackedRows.of(tensor.codes, tensor.zeros)
            about[name] = [rows.scale_exponent, rows.weights, rows.zeros]
            pieces = {
                "scales": rows.scale_bytes,
                "base": rows.base,
                **dict(zip(map(str, PLANES), rows.planes, strict=True)),
            }
            data |= {f"{name}|{key}": piece.contiguous() for key, piece in pieces.items()}
        path, partial = self._part(self.done), self.folder / "part.partial"
        states = "" if after is None else hashlib.sha256(after.reshape(-1).numpy().data).hexdigest()
        with explained(self.folder):
            _save(
                data,
                partial,
                {"about": json.dumps(about), "plain": json.dumps(list(plain)), "states": states},
            )
            for file in (partial,) if after is None else (self._states(self.done + 1), partial):
                flush(file)
            os.rename(partial, path)
            flush(self.folder)
        self.done += 1

    @property
    def plain(self) -> list[str]:
        """What could not be calibrated."""
        found: list[str] = []
        for number in range(self.done):
            found += json.loads(self._open(number).metadata()["plain"])
        return found

    def rows(self, name: str) -> Iterator[PackedRows] | None:
        """The packed rows of a tensor, if a part has it."""
        for number in range(self.done):
            part = self._open(number)
            if name in (about := json.loads(part.metadata()["about"])):
                scales, base, *planes = (
                    part.get_tensor(f"{name}|{key}") for key in ("scales", "base", *map(str, PLANES))
                )
                exponent, weights, zeros = about[name]
                return iter([PackedRows(scales, exponent, base, planes, weights, zeros)])
        return None

    def stored(self, name: str) -> torch.Tensor | None:
        """A tensor that is not packed, if it was changed."""
        for number in range(self.done):
            part = self._open(number)
            if f"{name}|{_STORED}" in part.keys():  # noqa: SIM118 (not a mapping)
                found: torch.Tensor = part.get_tensor(f"{name}|{_STORED}")
                return found
        return None

    def remove(self) -> None:
        """Everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_unless_worth_keeping(self) -> None:
        """Everything, if no part is finished."""
        if not self._part(0).is_file():
            self.remove()

    def _states_fit(self) -> bool:
        """Whether the states are those the last part was finished with; after the head none are needed."""
        stated, path = self._open(self.done - 1).metadata().get("states"), self._states(self.done)
        if stated == "":
            return True
        try:
            with path.open("rb") as file:
                return bool(stated == hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            return False

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05}"

    def _states(self, number: int) -> Path:
        return self.folder / f"states-{number % 2}"

    def _open(self, number: int) -> Any:
        try:
            return safe_open(self._part(number), framework="pt")
        except (OSError, SafetensorError) as error:
            raise OtaroError(
                f"{self._part(number)} is damaged ({error}); remove {self.folder} and begin anew"
            ) from error


def _reserve(path: Path, size: int) -> None:
    """Have the disk set so many bytes aside for a file, where the system can."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise TargetError(
                f"the disk is full: hidden states take {2 * size:,} bytes in {path.parent}; free some "
                "space, choose another "
                "place, or give fewer --samples"
            ) from error
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that sets nothing aside
            raise
    finally:
        os.close(descriptor)


def _save(data: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """`save_file`, with the system's refusals as the system's."""
    try:
        save_file(data, path, metadata)
    except SafetensorError as error:
        path.unlink(missing_ok=True)
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
