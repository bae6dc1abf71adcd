"""The files that measuring leaves and reads again: what each of their fields may be, for pydantic to check.

Files travel with models and runs and so come from strangers. `check` looks at all of one and changes nothing
of it: numbers stay as they were written. Fields that are not named here are let through in what a run leaves,
and refused in a quality record. Names are free of control characters, which could otherwise speak to the
terminal that shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from functools import cache
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from otaro.file.coding import is_group_size, is_reconstruction
from otaro.file.fits import fit_name, is_fit
from otaro.file.header import is_digest
from otaro.sefp.precision import PRECISIONS

FULL = "fp"  # the precision that an unquantized checkpoint has
PRECISION_NAMES = (FULL, *map(str, PRECISIONS))
LONGEST = 4096  # characters of a string
_EXACT = 1 << 53  # integers beyond are not exact in a browser
_HUGE = 1e300
LARGEST_LOSS = 1e6  # nats: a file that says more is not of a model that runs
_LARGEST_ERROR = 1e30  # squared and summed: weights are below 2^16


def check(kind: Any, stored: object) -> Any:
    """What is stored, if it is such a record; else a ValueError that names the first wrong field."""
    try:
        _adapter(kind).validate_python(stored, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(_worded(error)) from None
    return stored


_adapter = cache(pydantic.TypeAdapter)


def _worded(error: pydantic.ValidationError) -> str:
    """`entries.0.window: input should be greater than 0, not '-1'`."""
    first = error.errors(include_url=False, include_context=False)[0]
    tagged = first["type"].startswith("union_tag")
    what = "it should be of a known kind" if tagged else first["msg"].removeprefix("Value error, ")[:200]
    where = ".".join(str(part)[:80] for part in first["loc"] if part != "[key]")
    told = f"{where}: {what[:1].lower()}{what[1:]}".removeprefix(": ")
    if first["type"] not in ("missing", "extra_forbidden") and not isinstance(first["input"], dict | list):
        told += f", not {str(first['input'])[:40]!r}"
    return told if told.isprintable() else ascii(told)


def _that(holds: Callable[[Any], bool], words: str) -> AfterValidator:
    """A rule that values of a type keep; `words` say so where one does not."""
    return AfterValidator(_rule(holds, words))


def _rule(holds: Callable[[Any], bool], words: str) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        try:
            sound = holds(value)
        except ValueError:  # a PrecisionError is one
            sound = False
        if not sound:
            raise ValueError(words)
        return value

    return checked


def is_exact(value: object) -> bool:
    """Whether it is a number, and one that a browser reads as it is."""
    return type(value) is float or (type(value) is int and abs(value) < _EXACT)


def _is_chosen(value: str) -> bool:
    """One for all tensors, or the name of a fit in its one spelling."""
    return value in PRECISION_NAMES or (is_fit(value) and fit_name(value) == value)


# What runs leave --------------------------------------------------------------------------------------------

_choices = ", ".join(PRECISION_NAMES)
PrecisionName = Annotated[str, _that(PRECISION_NAMES.__contains__, f"it should be one of {_choices}")]
# a run may leave NaN or infinity
Number = Annotated[float, BeforeValidator(_rule(is_exact, "it should be a number"))]
Above = Annotated[Number, _that(lambda value: not value <= 0, "it should be above zero")]
Whole = Annotated[int, Field(ge=0, lt=_EXACT)]
Positive = Annotated[int, Field(gt=0, lt=_EXACT)]
Matrix = list[list[Number | None]]


class Tuning(TypedDict):
    """config.json of a tuning run, as far as it is needed here."""

    model: str
    data: str
    options: dict[str, Any]
    training: dict[str, Any]
    versions: dict[str, Any]


class HeldOut(TypedDict):
    """perplexity.json of a tuning run."""

    before: NotRequired[dict[PrecisionName, Above]]
    after: NotRequired[dict[PrecisionName, Above]]
    tokens: NotRequired[Positive | None]


class TrainedStep(TypedDict):
    """A line of log.jsonl about a step."""

    step: Positive
    precision: PrecisionName
    loss: Number
    cross_entropy: NotRequired[Number]


class _Timed(TypedDict):
    precision: str
    prefill: Above
    decode: Above
    weight_bytes: Above
    bandwidth_share: NotRequired[Above]


class BenchSettings(TypedDict):
    """How long the turns of a bench were."""

    prompt_tokens: Whole
    tokens: Whole
    context: Whole
    rounds: Whole


class Bench(TypedDict):
    """bench.json: what `otaro bench --json` printed."""

    machine: str
    kernels: str
    threads: int
    device: str
    settings: BenchSettings
    precisions: Annotated[list[_Timed], Field(min_length=1)]


class _Module(TypedDict):
    module: str
    projection: str
    layer: NotRequired[int | None]
    matrix: Matrix


class _Gradients(TypedDict):
    precisions: Annotated[list[PrecisionName], Field(min_length=1)]
    overall: Matrix
    modules: list[_Module]


def _are_square(found: _Gradients) -> bool:
    size = len(found["precisions"])
    matrices = [found["overall"], *(module["matrix"] for module in found["modules"])]
    return all(len(matrix) == size and all(len(row) == size for row in matrix) for matrix in matrices)


Gradients = Annotated[_Gradients, _that(_are_square, "overall or a module is not a matrix of the precisions")]
"""gradients.json of `otaro analyze`."""


# The quality record -----------------------------------------------------------------------------------------

Count = Annotated[int, Field(gt=0, lt=1 << 63)]
# NaN is not
Figure = Annotated[float, _that(lambda value: abs(value) < _HUGE, "it should be finite")]
Speed = Annotated[Figure, Field(gt=0)]
_shown = _that(str.isprintable, "it should be printable")
Name = Annotated[str, Field(min_length=1, max_length=LONGEST), _shown]
Digest = Annotated[str, _that(is_digest, "it should be a SHA-256")]
Day = Annotated[str, _that(lambda day: date.fromisoformat(day).isoformat() == day, "it should be a date")]
GroupSize = Annotated[int, _that(is_group_size, "it should be a multiple of 32")]
Reconstruction = Annotated[str, _that(is_reconstruction, "it should be midpoint or truncate")]
_closed = pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
_KV = ("float16", *PRECISION_NAMES[1:])


class At(TypedDict):
    """What every entry is identified by, besides its kind."""

    precision: Annotated[str, _that(_is_chosen, f"it should be a fit or one of {_choices}")]
    fit_sha256: NotRequired[Digest]
    group_size: NotRequired[GroupSize]
    reconstruction: NotRequired[Reconstruction]
    device: Name
    reference_model: NotRequired[Digest]


class OnText(At):
    """What entries about a text are identified by."""

    text: Name
    text_sha256: Digest
    window: Count
    tokens: Count
    bos: bool
    kv: NotRequired[Annotated[str, _that(_KV.__contains__, "it should be float16 or a precision")]]


class _Made(TypedDict):
    command: Name
    date: Day
    versions: Annotated[dict[Name, Name], Field(max_length=31)]


@_closed
class _Perplexity(OnText, _Made):
    kind: Literal["perplexity"]
    stride: Count
    value: Speed
    tokens_per_second: Speed


@_closed
class _Divergence(OnText, _Made):
    kind: Literal["divergence"]
    reference: PrecisionName
    kl: Figure
    agreement: Annotated[float, Field(ge=0, le=1)]


@_closed
class _Task(At, _Made):
    kind: Literal["task"]
    task: Name
    limit: Count | None
    data_sha256: Digest | None
    metric: Name
    value: Figure
    stderr: Figure | None
    samples: Count
    truncated: Annotated[int, Field(ge=0, lt=1 << 63)]


def _has_its_fit(entry: At) -> bool:
    return is_fit(entry["precision"]) == ("fit_sha256" in entry)


def _has_its_coding(entry: At) -> bool:
    return len(entry.keys() & {"group_size", "reconstruction"}) == (0 if entry["precision"] == FULL else 2)


Entry = Annotated[
    Annotated[_Perplexity | _Divergence | _Task, Field(discriminator="kind")],
    _that(_has_its_fit, "fit_sha256 goes with the name of a fit, and with no other precision"),
    _that(_has_its_coding, "group_size and reconstruction go with every precision but full"),
]


@_closed
class Quality(TypedDict):
    """quality.json."""

    schema: Literal[1]
    model: Digest
    entries: list[Entry]


IDENTITY = {
    "perplexity": (*OnText.__annotations__, "stride"),
    "divergence": (*OnText.__annotations__, "reference"),
    "task": (*At.__annotations__, "task", "limit", "data_sha256"),
}
"""The fields that tell entries of a kind apart."""


# What tensors lose ------------------------------------------------------------------------------------------


@_closed
class _Read(TypedDict):
    text_sha256: Digest
    tokens: Count
    window: Count
    finest: PrecisionName
    device: str
    divergences: dict[str, list[Annotated[Number, Field(ge=0, le=LARGEST_LOSS)]]]
    errors: dict[str, list[Annotated[Number, Field(ge=0, le=_LARGEST_ERROR)]]]


@_closed
class Sensitivity(TypedDict):
    """sensitivity.json."""

    version: Literal[1]
    model: Digest
    readings: list[_Read]
