"""Thousands of hostile calls; OTARO_FUZZ_CALLS sets how many, OTARO_FUZZ_SEED which ones.

OTARO_FUZZ_CALLS=500000 pytest tests/kernels/test_fuzz.py        # a million in all, in half an hour or so
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from otaro.kernels import cpu, ops

from . import fuzz

CALLS = int(os.environ.get("OTARO_FUZZ_CALLS", "3000"))
SEED = int(os.environ.get("OTARO_FUZZ_SEED", "0"))


@pytest.mark.parametrize(
    "one_call",
    [
        fuzz.through_ops,
        pytest.param(fuzz.through_extension, marks=pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING)),
    ],
    ids=["operations", "extension"],
)
def test_hostile_calls_end_in_the_right_answer_or_in_a_refusal(one_call, monkeypatch):
    monkeypatch.setenv(ops.OVERRIDE, "reference")  # so that what the calls leave behind is put back
    ends: Counter[str] = Counter()
    number = 0
    while ends.total() < CALLS:
        try:
            ends += one_call(SEED, number)
        except Exception as error:
            raise AssertionError(f"{one_call.__name__}({SEED}, {number}) ended in {error!r}") from error
        number += 1
    # Half of the calls are honest; of the others most are refused. Else this would test nothing.
    assert ends[fuzz.ANSWERED] > CALLS / 2
    assert ends[fuzz.REFUSED] > CALLS / 5
