"""Something to tune for: the reference documentation of torch, as the installed package carries it.

It is English that the built-in model has never seen, about a subject it knows nothing of, and it is there
wherever otaro is. Entries are split by a hash of their name into a text to tune on (`--data builtin`) and one
to measure on (`--text builtin`); a paragraph that several entries share counts for the first of them alone.
Another version of torch words some entries differently, which moves perplexities a little.
"""

import functools
import hashlib
import importlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Literal

PACKAGES = ("", ".nn", ".nn.functional", ".optim", ".linalg", ".special", ".fft", ".distributions")
HELD_OUT_SHARE = 32  # one entry of so many
SHORTEST_PARAGRAPH, SHORTEST_ENTRY = 60, 300  # characters; less is a heading, or a pointer to another entry


def documentation_text(part: Literal["tuning", "heldout"]) -> str:
    """One of the two texts, entries in the order of their names."""
    return "\n\n".join(
        entry for name, entry in _entries().items() if (_hash(name) == 0) == (part == "heldout")
    )


@functools.cache
def _entries() -> dict[str, str]:
    entries, seen = {}, set()
    for name, text in _docstrings():
        paragraphs = [
            p for p in inspect.cleandoc(text).split("\n\n") if len(p) >= SHORTEST_PARAGRAPH and p not in seen
        ]
        seen.update(paragraphs)
        entry = "\n\n".join(paragraphs)
        if len(entry) >= SHORTEST_ENTRY:
            entries[name] = entry
    return entries


def _docstrings() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        module = importlib.import_module(f"torch{package}")
        for name in sorted(vars(module)):
            found = vars(module)[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated names warn when they are looked at
                text = getattr(found, "__doc__", None)
            # not modules, which may be Python's or numpy's
            documented = inspect.isroutine(found) or inspect.isclass(found)
            if documented and not name.startswith("_") and isinstance(text, str):
                yield f"torch{package}.{name}", text


def _hash(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE
