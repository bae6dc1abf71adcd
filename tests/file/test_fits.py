"""precisions.json: what is written is read again, and whatever else it says is refused."""

import json
from contextlib import nullcontext
from decimal import Decimal

import pytest

from otaro.errors import FormatError, OtaroError, OtaroWarning, PrecisionError, ShardMissingError
from otaro.file.fits import (
    Budget,
    Fit,
    bytes_of,
    find_fit,
    is_fit,
    parse_fits,
    read_fits,
    weights_of,
    write_fit,
)
from otaro.file.header import shard_name
from otaro.file.io import NestedDirectory
from otaro.file.replace import carry_over
from otaro.file.summary import precision_summary
from otaro.sefp.precision import PRECISIONS, Precision

ABOUT = {
    "predicted": 0.1,
    "measured": 0.2,
    "uniform": "E5M3",
    "uniform_measured": 0.3,
    "reference": "E5M8",
    "text": "a text",
    "text_sha256": "0" * 64,
    "tokens": 512,
    "command": "otaro fit DIR",
    "date": "2026-11-16",
}


@pytest.fixture
def nested(nested_dir, copy_of):
    return NestedDirectory(copy_of(nested_dir))


def mixed(nested, name="90MB", finest="E5M5"):
    names = list(nested.schema.packed)
    precisions = dict.fromkeys(names, Precision("E5M3")) | {names[0]: Precision(finest)}
    size = bytes_of(nested, precisions)
    return Fit(name, precisions, {**ABOUT, "bytes": size, "bits_per_weight": 8 * size / weights_of(nested)})


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("90MB", "90MB", 90_000_000),
        ("90.50 mb", "90.5MB", 90_500_000),
        ("1.5GiB", "1.5GiB", 3 << 29),
        ("100b", "100B", 100),
        ("4.50bits", "4.5bits", None),
        ("40TPS", "40tps", None),
        ("86363136B", "86363136B", 86_363_136),
    ],
)
def test_budgets_have_one_name_however_they_are_written(text, name, count):
    budget = Budget.parse(text)
    assert (budget.name, budget.bytes) == (name, count)
    assert Budget.parse(budget.name) == Budget(Decimal(budget.amount), budget.unit)


@pytest.mark.parametrize(
    "text", ["", "90", "MB", "0MB", "-1MB", "1e9B", "90XB", "90MB\n90MB", "９０MB", "1" * 99 + "MB"]
)
def test_other_budgets_are_refused(text):
    with pytest.raises(OtaroError, match="is no budget; write 90MB"):
        Budget.parse(text)


def test_sizes_are_those_that_inspect_counts(nested):
    for precision in PRECISIONS:
        bits = precision_summary(nested, precision).bits_per_weight
        assert 8 * bytes_of(nested, precision) / weights_of(nested) == bits
        assert bytes_of(nested, dict.fromkeys(nested.schema.packed, precision)) == bytes_of(nested, precision)


def test_fits_are_kept_side_by_side_and_found_by_any_spelling(nested):
    assert read_fits(nested) == {}
    first, second = mixed(nested), mixed(nested, "4.5bits", "E5M8")
    write_fit(nested, first)
    write_fit(nested, second)
    assert read_fits(nested) == {"90MB": first, "4.5bits": second}
    assert find_fit(nested, "FIT:90.0 mb") == first
    assert (str(first), first.finest, first.bytes) == ("fit:90MB", Precision("E5M5"), bytes_of(nested, first))
    replaced = mixed(nested, "90MB", "E5M4")
    write_fit(nested, replaced)
    assert read_fits(nested) == {"90MB": replaced, "4.5bits": second}


def test_the_first_files_lack_reference_and_tokens_and_are_read(nested):
    text = damaged(nested, lambda raw, fit: [fit.pop(field) for field in ("reference", "tokens")])
    _, fits = parse_fits(text, nested)
    assert fits["90MB"].precisions == mixed(nested).precisions
    assert "reference" not in fits["90MB"].about


def test_only_names_of_fits_are_taken_for_one():
    assert is_fit("fit:90MB")
    assert is_fit(" Fit:x")
    assert not is_fit("E5M4")
    assert not is_fit("fits")
    assert not is_fit(None)
    assert not is_fit(4)


def test_a_fit_that_is_not_there_is_refused_with_the_command_that_makes_it(nested):
    with pytest.raises(
        PrecisionError,
        match=r"has no fit:80MB, there are no fits yet; make it with: otaro fit .* --budget "
        r"80MB$",
    ):
        find_fit(nested, "fit:80MB")
    write_fit(nested, mixed(nested))
    with pytest.raises(
        PrecisionError,
        match=r"has no fit:4.5bits, there are fit:90MB; make it with: .* "
        r"--bits 4.5$",
    ):
        find_fit(nested, "fit:4.5bits")
    with pytest.raises(PrecisionError, match="fit:nonsense: 'nonsense' is no budget"):
        find_fit(nested, "fit:nonsense")


def test_missing_planes_are_refused_with_the_command_that_brings_them(nested):
    write_fit(nested, mixed(nested))
    (nested.path / shard_name(5)).unlink()
    with pytest.raises(
        ShardMissingError,
        match=r"fit:90MB needs shards up to model-m5.safetensors.* complete up to E5M4; "
        r".* E5M5$",
    ):
        find_fit(NestedDirectory(nested.path), "fit:90MB")


def damaged(nested, change):
    raw = {"version": 1, "model": nested.model, "fits": {"90MB": mixed(nested).to_dict()}}
    change(raw, raw["fits"]["90MB"])
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw, fit: raw.update(version=2), "its version is '2'"),
        (lambda raw, fit: raw.update(version=True), "its version is 'True'"),
        (lambda raw, fit: raw.update(model="no digest"), "not a SHA-256"),
        (lambda raw, fit: raw.update(extra=1), "does not consist of version, model and fits"),
        (lambda raw, fit: raw.update(fits=[]), "not an object"),
        (lambda raw, fit: raw.update(fits={f"{n}MB": fit for n in range(1, 300)}), "of 256 at most"),
        (lambda raw, fit: raw["fits"].update({"90 mb": fit}), "'90 mb' is not named after a budget"),
        (lambda raw, fit: raw["fits"].update({"\x1b[31m": fit}), "is not named after a budget"),
        (lambda raw, fit: raw["fits"].update({"80MB": 4}), "does not consist of precisions"),
        (lambda raw, fit: fit.pop("bytes"), "does not consist of precisions"),
        (lambda raw, fit: fit.update(bytes=-1), "bytes is '-1'"),
        (lambda raw, fit: fit.update(bytes=1.5), "bytes is '1.5'"),
        (
            lambda raw, fit: fit.update(bytes=5),
            "bytes by its precisions, and its bytes or bits_per_weight say something else",
        ),
        (lambda raw, fit: fit.update(bits_per_weight=4.7), "its bytes or bits_per_weight say something else"),
        (lambda raw, fit: fit.update(bits_per_weight=10**400), "bits_per_weight is '1000"),
        (lambda raw, fit: fit.update(measured=10**400), "measured is '1000"),
        (lambda raw, fit: fit.update(uniform_measured=10**400), "uniform_measured is '1000"),
        (lambda raw, fit: fit.update(measured=1e308), "measured is '1e.308'"),
        (lambda raw, fit: fit.update(measured=-5), "measured is '-5'"),
        (lambda raw, fit: fit.update(predicted="a"), "predicted is 'a'"),
        (lambda raw, fit: fit.update(measured=True), "measured is 'True'"),
        (lambda raw, fit: fit.update(predicted=float("nan")), "NaN is no number"),
        (lambda raw, fit: fit.update(uniform="e5m3"), "uniform is 'e5m3'"),
        (lambda raw, fit: fit.update(uniform=3), "uniform is '3'"),
        (lambda raw, fit: fit.update(reference="E5M9"), "reference is 'E5M9'"),
        (lambda raw, fit: fit.update(tokens=-1), "tokens is '-1'"),
        (lambda raw, fit: fit.update(text="\x1b[2J"), "text is"),
        (lambda raw, fit: fit.update(text_sha256="0"), "text_sha256 is '0'"),
        (lambda raw, fit: fit.update(date="today"), "date is 'today'"),
        (lambda raw, fit: fit.update(precisions=[]), "does not have one precision for each packed tensor"),
        (lambda raw, fit: fit["precisions"].popitem(), "does not have one precision for each packed tensor"),
        (lambda raw, fit: fit["precisions"].update(other="E5M3"), "'other' is in one and not in the other"),
        (
            lambda raw, fit: fit["precisions"].update({next(iter(fit["precisions"])): "E5M2"}),
            "unknown precision 'E5M2'",
        ),
        (
            lambda raw, fit: fit["precisions"].update({next(iter(fit["precisions"])): 4}),
            "unknown precision 4",
        ),
    ],
)
def test_whatever_else_a_file_says_is_refused(nested, change, why):
    text = damaged(nested, change)
    with pytest.raises(ValueError, match=why.replace("[", r"\[")):
        parse_fits(text, nested)
    (nested.path / "precisions.json").write_text(text)
    with pytest.raises(FormatError, match=r"cannot be used: .*; move it away and run `otaro fit` again"):
        find_fit(nested, "fit:90MB")
    with pytest.raises(FormatError):
        write_fit(nested, mixed(nested))  # what cannot be read is not written over
    assert (nested.path / "precisions.json").read_text() == text


@pytest.mark.parametrize("text", ["", "[", "{}", "4", "[" * 100_000, '{"version": 1}'])
def test_what_is_no_such_file_is_refused(nested, text):
    (nested.path / "precisions.json").write_text(text)
    with pytest.raises(FormatError, match="cannot be used"):
        read_fits(nested)


def test_a_file_of_another_model_or_of_any_size_is_refused(nested, make_nested):
    other = NestedDirectory(make_nested("llama_tied"))
    text = damaged(nested, lambda raw, fit: raw.update(model=other.model))
    (nested.path / "precisions.json").write_text(text)
    with pytest.raises(FormatError, match="it is for another model"):
        read_fits(nested)
    with (nested.path / "precisions.json").open("w") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(FormatError, match="it is larger than any"):
        read_fits(nested)


def test_fits_stay_with_their_model_and_those_of_another_are_put_aside(nested, tmp_path):
    write_fit(nested, mixed(nested))
    same, other = tmp_path / "same", tmp_path / "other"
    for place, model in ((same, nested.model), (other, "f" * 64)):
        place.mkdir()
        with nullcontext() if place == same else pytest.warns(OtaroWarning, match="kept as precisions-"):
            carry_over(nested.path, place, model, [])
    text = (nested.path / "precisions.json").read_text()
    assert (same / "precisions.json").read_text() == text
    assert not (other / "precisions.json").exists()
    assert (other / f"precisions-{nested.model[:12]}.json").read_text() == text
