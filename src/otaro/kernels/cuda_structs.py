"""What a kernel takes: a structure by value, declared once, in its source.

Python reads the fields there (`structure`) and fills them by name (`filled`). A source is compiled with
assertions that the compiler lays its structure out as ctypes does (`assertions`), so that what cannot be read
right does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import Array, Structure, c_float, c_int, c_int64, c_void_p, sizeof
from functools import cache
from pathlib import Path
from typing import Any

import torch

from otaro.errors import KernelError

SOURCES = Path(__file__).parent / "cuda_src"
FORMAT = SOURCES.parent / "shared" / "sefp_format.h"
HEADERS = (*(SOURCES / one for one in ("sefp.cuh", "halves.cuh", "hopper.cuh")), FORMAT)

_NUMBERS = {"int": c_int, "int64_t": c_int64, "float": c_float}
_PLAIN = {int, float, type(None)}


@cache
def text(file: str) -> str:
    """A source after its headers, without comments."""
    return re.sub(r"//.*", "", "".join(one.read_text() for one in (*HEADERS, SOURCES / file)))


@cache
def parameters(file: str) -> dict[str, type[Structure]]:
    """What each kernel of a source takes, by the kernel's name."""
    return {
        name: structure(file, kind)
        for name, kind in re.findall(
            r"(\w+)\(const __grid_constant__ (\w+) "
            r"p\)",
            text(file),
        )
    }


@cache
def structure(file: str, name: str) -> type[Structure]:
    """A structure of a source or its headers: numbers, pointers, other structures, and arrays of them."""
    declared = re.search(rf"\bstruct {name} {{(.*?)}};", text(file), re.DOTALL)
    assert declared, f"{file} has no structure {name}"
    fields = []
    for kind, names in re.findall(r"(?:const )?(\w+)([^;]+);", declared[1]):
        of_each: Any = c_void_p if "*" in names else _NUMBERS.get(kind) or structure(file, kind)
        for field, size in re.findall(r"(\w+)(?:\[([^]]+)\])?(?:,|$)", names):
            fields.append(
                (field, of_each * sum(_number(file, one) for one in size.split(" + ")) if size else of_each)
            )
    return type(name, (Structure,), {"_fields_": fields, "names": {field for field, _ in fields}})


@cache
def assertions(file: str) -> str:
    """C++ that compiles where what the kernels of a source take lies as ctypes has it."""
    facts = {fact: None for kind in parameters(file).values() for fact in _facts(kind)}
    return "\n" + "".join(f"static_assert({fact});\n" for fact in facts)


def filled(kind: Any, values: dict[str, Any]) -> Structure:
    """A structure with its fields by name: tensors give addresses, None is null, what arrays lack is zero."""
    if values.keys() != kind.names:
        raise KernelError(
            f"{kind.__name__} was given too much or too little: "
            f"{', '.join(sorted(values.keys() ^ kind.names))}"
        )
    given = ((of_field, values[name]) for name, of_field in kind._fields_)
    made: Structure = kind(
        *[one if type(one) in _PLAIN else _value(of_field, one) for of_field, one in given]
    )
    return made


def _value(kind: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, dict):
        return filled(kind, value)
    if isinstance(value, Structure):
        return value
    return kind(*[one if type(one) in _PLAIN else _value(kind._type_, one) for one in value])


def _number(file: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)[,;]", text(file))
    return int(found[1] if found else name)


def _facts(kind: Any) -> Iterator[str]:
    yield f"sizeof({kind.__name__}) == {sizeof(kind)}"
    for name, of_field in kind._fields_:
        yield f"offsetof({kind.__name__}, {name}) == {getattr(kind, name).offset}"
        yield f"sizeof({kind.__name__}::{name}) == {sizeof(of_field)}"
        of_each: Any = of_field._type_ if issubclass(of_field, Array) else of_field
        if issubclass(of_each, Structure):
            yield from _facts(of_each)
