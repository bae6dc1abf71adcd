"""Precisions by name."""

from __future__ import annotations

import copy
import pickle

import pytest

from otaro.errors import OtaroError, PrecisionError
from otaro.sefp.precision import PRECISIONS, Precision, of_mantissa_bits

NAMES = ["E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"]
BITS = dict(zip(NAMES, [8, 7, 6, 5, 4, 3], strict=True))
BY_NAME = pytest.mark.parametrize("name", NAMES)


def test_there_are_six_precisions_finest_first():
    assert [str(p) for p in PRECISIONS] == NAMES
    assert isinstance(PRECISIONS, tuple)


@BY_NAME
def test_a_name_gives_its_mantissa_bits_and_back(name):
    precision = Precision(name)
    assert precision.mantissa_bits == BITS[name]
    assert str(precision) == f"{precision}" == name
    assert of_mantissa_bits(BITS[name]) == precision


@BY_NAME
def test_the_repr_makes_the_same_precision(name):
    assert repr(Precision(name)) == f"Precision('{name}')"
    assert eval(repr(Precision(name))) == Precision(name)


@BY_NAME
def test_a_precision_of_a_precision_is_itself(name):
    assert Precision(Precision(name)) == Precision(name)


def test_more_mantissa_bits_compare_as_greater():
    assert sorted(PRECISIONS) == list(reversed(PRECISIONS))
    assert max(PRECISIONS) == Precision("E5M8")
    assert min(PRECISIONS) == Precision("E5M3")
    for i, finer in enumerate(PRECISIONS):
        for coarser in PRECISIONS[i + 1 :]:
            assert finer > coarser
            assert finer >= coarser
            assert coarser < finer
            assert coarser <= finer
            assert not finer < coarser
            assert not finer <= coarser
            assert finer != coarser


@BY_NAME
def test_equal_precisions_are_one_key(name):
    assert Precision(name) == Precision(name)
    assert hash(Precision(name)) == hash(Precision(name))
    assert Precision(name) <= Precision(name)
    assert Precision(name) >= Precision(name)
    assert len({*PRECISIONS, Precision(name)}) == 6


def test_a_precision_is_neither_its_name_nor_its_number():
    assert Precision("E5M4") != "E5M4"
    assert Precision("E5M4") != 4
    for other in ("E5M8", 8, None):
        with pytest.raises(TypeError, match="not supported between"):
            Precision("E5M4") < other  # noqa: B015


def test_a_precision_cannot_be_changed():
    precision = Precision("E5M4")
    with pytest.raises(AttributeError):
        precision.mantissa_bits = 8
    with pytest.raises((AttributeError, TypeError)):  # which one depends on the version of Python
        precision.colour = "red"
    assert not hasattr(precision, "colour")
    assert precision == Precision("E5M4")


def test_the_bits_of_a_precision_cannot_be_deleted():
    precision = Precision("E5M4")
    with pytest.raises(AttributeError):
        del precision.mantissa_bits
    assert precision == Precision("E5M4")


@BY_NAME
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_precision_comes_back(name, protocol):
    assert pickle.loads(pickle.dumps(Precision(name), protocol)) == Precision(name)


@BY_NAME
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_copied_precision_is_equal(name, copied):
    assert copied(Precision(name)) == Precision(name)
    assert copied([Precision(name)]) == [Precision(name)]


def test_capitals_do_not_matter():
    assert [str(Precision(name)) for name in ("e5m4", "E5m4", "e5M4")] == ["E5M4"] * 3


@pytest.mark.parametrize(
    "wrong",
    ["E5M9", "e5m9", "E5M2", "E5M", "E4M3", "M4", " E5M4", "E5M4 ", "E5M04", "", 4, 4.0, None, True, b"E5M4"],
    ids=repr,
)
def test_another_spelling_is_refused_with_the_six_names(wrong):
    with pytest.raises(PrecisionError) as refused:
        Precision(wrong)
    assert repr(wrong) in str(refused.value)
    assert "E5M8, E5M7, E5M6, E5M5, E5M4, E5M3" in str(refused.value)
    assert isinstance(refused.value, OtaroError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("bits", [2, 9, 0, -3])
def test_no_precision_has_other_mantissa_bits(bits):
    with pytest.raises(PrecisionError, match="E5M8, E5M7, E5M6, E5M5, E5M4, E5M3"):
        of_mantissa_bits(bits)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("E5M8", 9.125), ("E5M7", 8.125), ("E5M6", 7.125), ("E5M5", 6.125), ("E5M4", 5.125), ("E5M3", 4.125)],
)
def test_bits_per_weight_are_sign_mantissa_and_a_share_of_the_scale(name, bits):
    assert Precision(name).bits_per_weight() == bits
    assert Precision(name).bits_per_weight(64) == bits
    assert Precision(name).bits_per_weight(32) == bits + 8 / 64
