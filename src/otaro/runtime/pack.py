"""`otaro.pack`: packs a model, and describes it for programs without Python where a decoder serves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec

from otaro.errors import OtaroError
from otaro.file import pack as file_pack
from otaro.file.io import NestedDirectory
from otaro.runtime.decoder_file import write_decoder_file

P = ParamSpec("P")


def _described(pack: Callable[P, NestedDirectory]) -> Callable[P, NestedDirectory]:
    @wraps(pack)
    def packed(*args: P.args, **options: P.kwargs) -> NestedDirectory:
        nested = pack(*args, **options)
        with suppress(OtaroError):  # no decoder serves it: such a model has no decoder.json
            write_decoder_file(nested.path)
        return nested

    return packed


pack = _described(file_pack.pack)
