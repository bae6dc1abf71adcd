"""Writes unicode.h beside it: what the tokenizer asks of characters. `python native/unicode.py`

Classes are asked of the library that tokenizers are made with, so that both have the same edition of Unicode;
canonical forms, which no edition changes, of Python.
"""

import unicodedata
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

CODES = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
TEXT = "".join(map(chr, CODES))


def ranges(codes: list[int]) -> list[tuple[int, int]]:
    """First and last of neighbours."""
    found: list[tuple[int, int]] = []
    for code in codes:
        if found and found[-1][1] == code - 1:
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return found


def of_class(pattern: str) -> list[tuple[int, int]]:
    """Characters that a pattern matches."""
    return ranges(
        [ord(piece) for piece, _ in Split(Regex(pattern), "removed", invert=True).pre_tokenize_str(TEXT)]
    )


def table(kind: str, name: str, rows: list[tuple[int, ...]], comment: str) -> str:
    """As C++."""
    lines, line = [], " "
    for row in rows:
        item = " {" + ", ".join(f"0x{number:x}" for number in row) + "},"
        if len(line + item) > 110:
            lines.append(line)
            line = " "
        line += item
    return f"// {comment}\nconstexpr {kind} {name}[] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


pairs, classes = [], []
for code in CODES:
    character = chr(code)
    if unicodedata.combining(character):
        classes.append((code, unicodedata.combining(character)))
    stated = unicodedata.decomposition(character)
    if stated and not stated.startswith("<"):
        first, second = ([int(part, 16) for part in stated.split()] + [0])[:2]
        composed = second != 0 and unicodedata.normalize("NFC", character) == character
        pairs.append((code, int(composed), first, second))

head = """// Made by unicode.py: do not edit.
#pragma once

#include <cstdint>

namespace otaro {

struct Range {
  uint32_t first, last;
};
struct CombiningClass {
  uint32_t code : 24, number : 8;
};
struct Canonical {
  uint64_t code : 21, composed : 1,  // whether the two become one again
    first : 21, second : 21;         // `second` is 0 where one character stands for another
};

"""
parts = [
    table("Range", "kLetters", of_class(r"\p{L}"), r"\p{L}"),
    table("Range", "kNumbers", of_class(r"\p{N}"), r"\p{N}"),
    table("Range", "kSpaces", of_class(r"\s"), r"\s"),
    table("CombiningClass", "kCombining", classes, "Canonical combining classes other than 0."),
    table("Canonical", "kCanonical", pairs, "Canonical decompositions, one step, but for Hangul."),
]
text = head + "\n".join(parts) + "\n}  // namespace otaro\n"
Path(__file__).with_name("unicode.h").write_text("// clang-format off\n" + text)
