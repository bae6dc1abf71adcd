from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

def linear(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    base: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    scales: Annotated[
        NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    planes: Sequence[
        Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    ],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
) -> None: ...
def mixed(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    base: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    scales: Annotated[
        NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    planes: Sequence[
        Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    ],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    bits: Sequence[int],
    out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
) -> None: ...
def dots(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    base: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    scales: Annotated[
        NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    planes: Sequence[
        Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    ],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    out: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order="C", device="cpu")],
) -> None: ...
def quantize(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    group_size: int,
    codes: Annotated[NDArray[numpy.int16], dict(shape=(None, None), order="C", device="cpu")],
    scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
) -> None: ...
def decode(
    base: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    scales: Annotated[
        NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    planes: Sequence[
        Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    ],
    length: int,
    group_size: int,
    truncate: bool,
    scale_exponent: int,
    rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None,
    out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
) -> None: ...
def unit_size(group_size: int) -> int: ...
def set_threads(count: int) -> None: ...
def available() -> list[str]:
    """Names of the instruction sets that this CPU can run, the best first."""

def chosen() -> str: ...
def choose(name: str) -> None: ...

class Matrix:
    def __init__(
        self,
        base: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        scales: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        length: int,
        group_size: int,
        truncate: bool,
        scale_exponent: int,
    ) -> None: ...

class Cache:
    @property
    def length(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def crop(self, length: int) -> None: ...
    def copy(self, other: Cache, length: int) -> None: ...

class Decoder:
    def __init__(self, model: dict, layers: list) -> None: ...
    def step(
        self,
        ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        caches: Sequence[Cache],
        counts: Sequence[int],
        bits: Sequence[bytes],
        wanted: Sequence[int],
        logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None,
    ) -> list[int]: ...
    def attach(
        self,
        matrix: int,
        bits: int,
        plane: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    def extend_positions(self, end: int) -> None: ...
    @property
    def positions(self) -> int: ...
    def new_cache(self, bits: int) -> Cache: ...

max_step: int = 64

def exponential(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
) -> None: ...
def angles(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    cosines: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    sines: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
) -> None: ...
def through_halves(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
) -> bool: ...
def encode(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    base: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
    planes: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")]],
    exponents: Annotated[NDArray[numpy.int8], dict(shape=(None, None), order="C", device="cpu")],
) -> None: ...
def release_pages(
    bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
) -> None: ...
