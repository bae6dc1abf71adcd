"""The folder beside the target where finished layers wait, so that a calibration that was stopped goes on where it was.

    state.json             a digest of model, text and settings: another one, and the folder is begun anew
    states-0, states-1     hidden states before the layer at hand, and after it; they take turns
    part-00000 ...         the packed tensors of a layer, and norms that were changed; the last one is the head

A part is put in place when the states after it are on disk, so the number of parts says where to go on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from otaro.errors import OtaroError
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
        state = folder / "state.json"
        if _read(state) != {"digest": digest}:
            shutil.rmtree(folder, ignore_errors=True)
            write_text(state, json.dumps({"digest": digest}) + "\n")
        self.done = 0
        """Parts that are finished."""
        while self._part(self.done).is_file():
            self.done += 1

    def states(self, number: int, shape: Sequence[int]) -> torch.Tensor:
        """Hidden states before the layer of that number, in a file."""
        size = int(torch.Size(shape).numel())
        with explained(self.folder):
            return torch.from_file(str(self._states(number)), shared=True, size=size).view(*shape)

    def finish(self, tensors: Mapping[str, Tensor], changed: Mapping[str, torch.Tensor], plain: Sequence[str]) -> None:
        """Write the next part; `plain` names what in it could not be calibrated."""
        data, about = {f"{name}|{_STORED}": tensor.contiguous() for name, tensor in changed.items()}, {}
        for name, tensor in tensors.items():
            rows = PackedRows.of(tensor.codes, tensor.zeros)
            about[name] = [rows.scale_exponent, rows.weights, rows.zeros]
            pieces = {"scales": rows.scale_bytes, "base": rows.base, **dict(zip(map(str, PLANES), rows.planes, strict=True))}
            data |= {f"{name}|{key}": piece.contiguous() for key, piece in pieces.items()}
        path, partial = self._part(self.done), self.folder / "part.partial"
        with explained(self.folder):
            save_file(data, partial, {"about": json.dumps(about), "plain": json.dumps(list(plain))})
            for file in (self._states(self.done + 1), partial):
                if file.is_file():
                    flush(file)
            os.rename(partial, path)
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
                scales, base, *planes = (part.get_tensor(f"{name}|{key}") for key in ("scales", "base", *map(str, PLANES)))
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

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05}"

    def _states(self, number: int) -> Path:
        return self.folder / f"states-{number % 2}"

    def _open(self, number: int) -> Any:
        try:
            return safe_open(self._part(number), framework="pt")
        except (OSError, SafetensorError) as error:
            raise OtaroError(f"{self._part(number)} is damaged ({error}); remove {self.folder} and begin anew") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
