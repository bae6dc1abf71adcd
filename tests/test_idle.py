"""Which options of `otaro tune` a run does not read."""

from dataclasses import asdict, fields, replace

import pytest

from otaro.idle import RULES, flag, idle
from otaro.sefp.precision import PRECISIONS
from otaro.tune.config import BEST, METHODS, Around, Options, Training, recipe

M8, M7, M6, M5, M4, M3 = PRECISIONS
DELAYED = {"delay", "ultra_low", "accumulate", "accumulator", "leftover"}
OF_ALL = {*DELAYED, "exploration"}


def unread(options, training=None, around=None):
    return set(idle({**options.to_dict(), **asdict(training or Training()), **asdict(around or Around())}))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (BEST, OF_ALL),
        (Options(method="uniform"), {*OF_ALL, "distill_at"}),
        (Options(method="uniform", distill=0.5), OF_ALL),
        (Options(method="otaro"), {"weights", "distill_at"}),
        (recipe("paper")[0], {"weights", "distill_at", "calibrate"}),
        (Options(method="otaro", ultra_low=()), {*DELAYED, "weights", "distill_at"}),
        (Options(method="otaro", precisions=(M8, M4)), {"weights", "distill_at"}),
        (Options(method="otaro", precisions=(M8, M5)), {*DELAYED, "weights", "distill_at"}),
        (Options(method="bps", distill=0.1), {*DELAYED, "weights"}),
        (Options(method="fp", distill=0.5), {*OF_ALL, "weights", "precisions", "distill", "distill_at"}),
        (Options(method="fixed:e5m4", distill=0.5), {*OF_ALL, "weights", "precisions"}),
        (
            Options(method="fixed:E5M7", distill=0.5),
            {*OF_ALL, "weights", "precisions", "distill", "distill_at"},
        ),
        # drawn are E5M5 and lower ones alone
        (replace(BEST, distill_at=(M8, M6)), {*OF_ALL, "distill", "distill_at"}),
        (replace(BEST, distill_at=(M8, M3)), OF_ALL),
        (replace(BEST, reconstruction="truncate"), {*OF_ALL, "calibrate"}),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else value.method,
)
def test_what_a_method_does_not_read(options, names):
    assert unread(options) == names


@pytest.mark.parametrize(
    ("training", "around", "names"),
    [
        (Training(fsdp=True), Around(), {"calibrate"}),
        (Training(), Around(hold_out=0.0), {"calibrate", "average", "eval_tokens"}),
        (Training(), Around(hold_out=0.0, eval_data="x.txt"), {"hold_out"}),
        (Training(), Around(eval_data="x.txt"), {"hold_out"}),
    ],
)
def test_what_a_run_does_not_read_for_its_data_and_processes(training, around, names):
    assert unread(BEST, training, around) == OF_ALL | names


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_read_chooses_no_step_and_keeps_no_gradient(method):
    """The parts that a run is made of, asked with other values of what is said to be idle."""
    plain = Options(method=method)
    other = Options(
        exploration=1.0, delay=3, ultra_low=(M3,), accumulate="mean", accumulator="host", precisions=(M8, M3),
        weights=(1.0, 0.0), method="uniform",
    )  # fmt: skip
    names = [name for name in (*OF_ALL, "weights", "precisions") if name in unread(plain)]
    if method.startswith("fixed:"):
        names.remove("precisions")  # which its options refuse
    if "precisions" not in names and "weights" in names:
        names.remove("weights")  # as many as there are precisions
    changed = replace(plain, **{name: getattr(other, name) for name in names})
    assert {name for name in names if name != "leftover"} == {
        name for name in names if getattr(changed, name) != getattr(plain, name)
    }
    assert vars(plain.search(0)).keys() == vars(changed.search(0)).keys()
    assert [plain.search(0).choose() for _ in range(5)] == [changed.search(0).choose() for _ in range(5)]
    assert plain.tuned_for == changed.tuned_for
    kept = plain.gradient_accumulator(), changed.gradient_accumulator()
    assert kept == (None, None) if "delay" in names else None not in kept


def test_rules_are_about_options_that_there_are():
    there = {field.name for kind in (Options, Training, Around) for field in fields(kind)} | {"recipe"}
    assert {name for rule in RULES for name in (*rule.options, *rule.by)} <= there
    assert all(rule.why for rule in RULES)


def test_a_run_of_before_an_option_was_there_can_be_asked_about():
    assert set(idle({})) == {*OF_ALL, "distill", "distill_at"}
    assert "exploration" not in idle({"method": "bps", "precisions": ["E5M4"]})
    assert set(idle({"method": "fp", "weights": None, "precisions": ["E5M8"]})) >= {"precisions", "weights"}


def test_flags_are_spelled_as_they_are_typed():
    assert [flag(name) for name in ("exploration", "l2_sp", "lr")] == ["--lambda", "--l2-sp", "--lr"]
