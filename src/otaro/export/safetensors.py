"""A safetensors file, filled tensor by tensor: its layout is known at the start, no tensor is ever whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from otaro.file.header import ALIGNMENT, DTYPE_NAMES

TYPE_NAMES = {**DTYPE_NAMES, torch.uint32: "U32"}


class SafetensorsWriter:
    """Writes `path`; tensors come in any order, each from its start to its end."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        end = 0
        # aligned, each for its type
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):
            start, end = end, end + prod(shape) * dtype.itemsize
            self._next[name], self._end[name] = start, end
            header[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._start = 8 + len(text)
        self._file = path.open("xb", buffering=0)
        if hasattr(os, "posix_fallocate"):
            # a full disk shows now, not after an hour
            os.posix_fallocate(self._file.fileno(), 0, self._start + end)
        self._write(0, memoryview(len(text).to_bytes(8, "little") + text))

    def append(self, name: str, data: torch.Tensor) -> None:
        """The next values of a tensor."""
        raw = data.contiguous().flatten().view(torch.uint8).numpy().data
        if self._next[name] + len(raw) > self._end[name]:
            raise AssertionError(f"{name}: more bytes than its shape allows")
        self._write(self._start + self._next[name], raw)
        self._next[name] += len(raw)

    def _write(self, at: int, raw: memoryview) -> None:
        self._file.seek(at)
        while raw:
            raw = raw[self._file.write(raw) :]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None and self._next != self._end:
            raise AssertionError("fewer bytes than the shapes need")
