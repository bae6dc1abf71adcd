"""What a run may be told: refusals in the command line's spelling, both recipes, what methods bring along."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from otaro.errors import OtaroError
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune.accumulate import GradientAccumulator
from otaro.tune.config import BEST, METHODS, ConfigError, Options, Training, recipe, with_precisions
from otaro.tune.path_search import BitWidthPathSearch, FixedSearch, UniformSearch

M8, M7, M6, M5, M4, M3 = PRECISIONS


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"method": "sgd"}, "--method sgd"),
        ({"method": ""}, "--method "),
        ({"method": "fixed"}, "--method fixed"),
        ({"method": "E5M4"}, "--method E5M4"),
        ({"precisions": ()}, "--precisions"),
        ({"precisions": (M8, M4, M8)}, "--precisions"),
        (
            {"precisions": (M3,), "method": "fixed:E5M4"},
            "--precisions: --method fixed:E5M4 has one of its own",
        ),
        ({"exploration": -0.1}, "--lambda -0.1"),
        ({"delay": 0}, "--delay 0"),
        ({"delay": -3}, "--delay -3"),
        ({"distill": -0.01}, "--distill -0.01"),
        ({"distill": 1.01}, "--distill 1.01"),
        ({"distill": math.nan}, "--distill nan"),
        ({"reconstruction": "nearest"}, "--reconstruction nearest"),
        ({"weights": (1.0, 2.0)}, "--weights gives 2 numbers for 6 --precisions"),
        ({"weights": ()}, "--weights gives 0 numbers for 6 --precisions"),
        ({"precisions": (M8, M4), "weights": (1.0,) * 6}, "--weights gives 6 numbers for 2 --precisions"),
        ({"weights": (1.0, 1.0, 1.0, 1.0, 1.0, -0.5)}, "--weights"),
        ({"weights": (0.0,) * 6}, "--weights"),
        ({"group_size": 0}, "--group-size 0"),
        ({"group_size": -64}, "--group-size -64"),
        ({"group_size": 48}, "--group-size 48"),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_spelling_of_its_flag(changes, flag):
    with pytest.raises(ConfigError) as refused:
        Options(**changes)
    assert str(refused.value).startswith(flag)


def test_an_unknown_precision_to_fix_names_the_flag_too():
    with pytest.raises(OtaroError, match="--method fixed:E5M9"):
        Options(method="fixed:E5M9")


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"exploration": math.nan}, "--lambda"),
        ({"full": math.nan}, "--full"),
        ({"l2_sp": math.nan}, "--l2-sp"),
        ({"l2_sp": math.inf}, "--l2-sp"),
        ({"average": math.nan}, "--average"),
        ({"weights": (1.0, 1.0, 1.0, 1.0, 1.0, math.nan)}, "--weights"),
        ({"weights": (1.0, 1.0, 1.0, 1.0, 1.0, math.inf)}, "--weights"),
    ],
)
def test_numbers_that_are_none_are_refused(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        Options(**changes)


@pytest.mark.parametrize(
    ("changes", "flag"), [({"accumulate": "max"}, "--accumulate"), ({"accumulator": "disk"}, "--accumulator")]
)
def test_unknown_ways_to_accumulate_are_refused(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        Options(method="otaro", **changes)


@pytest.mark.parametrize(("changes", "flag"), [({"l2_sp": -1.0}, "--l2-sp"), ({"average": 1.5}, "--average")])
def test_what_cannot_steady_a_run_is_refused(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        Options(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full": -0.1}, "--full -0.1: must be 0 or more, and less than 1"),
        ({"full": 1.0}, "--full 1.0: must be 0 or more, and less than 1; --method fp is all of it"),
        ({"full": 0.5, "method": "fp"}, "--full 0.5: --method fp has all of its loss in full precision"),
    ],
)
def test_a_share_in_full_precision_leaves_one_for_the_others(changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Options(**changes)


def test_refusals_are_errors_of_this_library_and_value_errors():
    assert issubclass(ConfigError, OtaroError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    "changes",
    [
        {"exploration": 0.0},
        {"delay": 1},
        {"distill": 0.0},
        {"distill": 1.0},
        {"average": 1.0},
        {"full": 0.0},
        {"full": 0.999},
        {"group_size": 32},
        {"weights": None},
        {"weights": (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)},
        {"precisions": (M4,)},
        {"method": "fixed:E5M3"},
        {"ultra_low": ()},
    ],
)
def test_the_ends_of_every_range_are_allowed(changes):
    options = Options(**changes)
    assert {name: getattr(options, name) for name in changes} == changes


def test_a_refusal_of_the_method_lists_those_there_are():
    with pytest.raises(ConfigError) as refused:
        Options(method="nonsense")
    assert all(method in str(refused.value) for method in METHODS)


# Recipes ----------------------------------------------------------------------------------------------------


def test_the_recipe_paper_is_what_the_paper_states():
    options, training = recipe("paper")
    assert options.to_dict() == {
        "method": "otaro",
        "precisions": ["E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"],
        "exploration": 5.0,
        "delay": 10,
        "ultra_low": ["E5M4", "E5M3"],
        "accumulate": "sum",
        "accumulator": "device",
        "leftover": "drop",  # the listing ends with its last batch
        "weights": [1.0] * 6,  # idle: nothing is drawn
        "distill": 0.0,
        "distill_at": ["E5M5", "E5M4", "E5M3"],  # idle: nothing is distilled
        "full": 0.0,
        "l2_sp": 0.0,
        "calibrate": False,
        "average": 0.0,
        "reconstruction": "truncate",
        "group_size": 64,
    }
    assert (training.optimizer, training.lr) == ("sgd", 1e-5)
    # Plain SGD: nothing scales the gradient or the learning rate, as line 18 of Algorithm 1 has it.
    assert (training.schedule, training.clip) == ("constant", 0.0)


def test_the_recipe_paper_changes_nothing_else_of_the_training():
    training = recipe("paper")[1]
    changed = {f.name for f in dataclasses.fields(Training) if getattr(training, f.name) != f.default}
    assert changed == {"optimizer", "lr", "schedule", "clip"}


ADDED = {"weights", "full", "distill", "calibrate", "average"}


def test_the_recipe_best_is_what_the_log_of_experiments_found():
    options, training = recipe("best")
    assert (options.method, options.weights) == ("uniform", (0.0, 0.0, 0.0, 1.0, 1.25, 2.6))
    assert (options.full, options.distill, options.distill_at) == (None, 0.5, (M5, M4, M3))
    assert (options.l2_sp, options.calibrate, options.average) == (0.0, True, 0.5)
    assert {
        field.name for field in dataclasses.fields(Options) if getattr(options, field.name) != field.default
    } == ADDED
    assert training == Training()  # the rate of tuning as usual, which `--method fp` has, too


def test_more_of_a_step_is_in_full_precision_where_data_are_new():
    assert [recipe("best")[0].full_share(passes) for passes in (0.2, 1, 3, 4, 20)] == [
        2 / 3,
        2 / 3,
        2 / 3,
        1 / 3,
        1 / 3,
    ]
    assert [Options(full=share).full_share(passes) for share in (0.0, 0.5) for passes in (1, 4)] == [
        0.0,
        0.0,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize("method", ["otaro", "bps", "uniform", "fixed:E5M4", "fp"])
def test_another_method_comes_without_what_the_recipe_best_adds(method):
    assert recipe("best", method) == (Options(method=method), Training())
    assert Training().lr == 5e-5  # the better one for `fixed:`
    plain = Options(method=method, weights=None, full=0.0, distill=0.0, l2_sp=0.0, average=0.0)
    assert Options(method=method) == plain


@pytest.mark.parametrize("method", ["uniform", "bps", "fp"])
def test_another_method_keeps_the_settings_of_the_paper(method):
    options, training = recipe("paper")
    assert recipe("paper", method) == (dataclasses.replace(options, method=method), training)


def test_a_way_back_that_would_undo_every_step_is_refused():
    with pytest.raises(ConfigError, match=re.escape("--l2-sp 23 undoes every step at --lr 0.05")):
        Options(l2_sp=23.0).check_rate(0.05)
    Options(l2_sp=23.0).check_rate(0.04)
    Options().check_rate(100.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": 0.0}, "--lr 0.0: must be a number above zero"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"epochs": -1.0}, "--epochs -1.0"),
        ({"clip": -1.0}, "--clip -1.0"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"grad_accum": 0}, "--grad-accum 0"),
        ({"lora": 0}, "--lora 0"),
        ({"sequence_length": 1}, "--sequence-length 1: must be at least 2"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 1 << 32}, "--seed 4294967296: must be from 0 to 4294967295"),
        ({"compile": True, "lora": 4}, "--compile cannot be combined with --lora"),
        ({"optimizer": "lion"}, "--optimizer lion: choose from adamw, adamw8bit, sgd"),
        ({"schedule": "step"}, "--schedule step: choose from cosine, linear, constant"),
    ],
)
def test_training_settings_that_make_no_sense_are_refused_by_their_flag(setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Training(**setting)


def test_an_unknown_recipe_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match="--recipe fast: choose from best, paper"):
        recipe("fast")


# What a method brings along ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "delays"),
    [
        ("otaro", BitWidthPathSearch, True),
        ("bps", BitWidthPathSearch, False),
        ("uniform", UniformSearch, False),
        ("fixed:E5M4", FixedSearch, False),
        ("fp", FixedSearch, False),
    ],
)
def test_each_method_has_its_search_and_only_otaro_delays_updates(method, kind, delays):
    options = Options(method=method)
    assert type(options.search(seed=0)) is kind
    assert (options.gradient_accumulator() is not None) is delays


def test_searches_get_the_options_they_were_made_for():
    search = Options(method="bps", exploration=0.7, precisions=(M4, M8)).search(seed=0)
    assert (search.precisions, search.exploration) == ([M8, M4], 0.7)
    search = Options(precisions=(M4, M8), weights=(3.0, 1.0)).search(seed=0)
    assert search.scores() == {"E5M4": 0.75, "E5M8": 0.25}
    assert Options(method="fixed:E5M4").search(seed=0).choose() == M4
    assert Options(method="fp").search(seed=0).choose() is None


def test_the_seed_decides_the_draws_of_uniform():
    def path(seed: int) -> list[Precision | None]:
        search = Options().search(seed)
        return [search.choose() for _ in range(50)]

    assert path(1) == path(1) != path(2)


def test_the_accumulator_gets_its_options():
    accumulator = Options(
        method="otaro", delay=7, accumulate="mean", accumulator="host"
    ).gradient_accumulator()
    assert isinstance(accumulator, GradientAccumulator)
    assert (accumulator.delay, accumulator.reduction, accumulator.place) == (7, "mean", "host")


@pytest.mark.parametrize(
    "options", [Options(), BEST, recipe("paper")[0], Options(method="fixed:E5M4"), Options(ultra_low=())]
)
def test_to_dict_is_json_and_names_every_option(options):
    stated = options.to_dict()
    assert json.loads(json.dumps(stated)) == stated
    assert stated.keys() == {field.name for field in dataclasses.fields(Options)}


def test_options_of_an_older_run_keep_their_meaning_or_are_refused():
    older = {"method": "uniform", "pull": 23.0, "average": 0.7}
    assert Options.from_dict(older | {"rates": "same"}) == Options(l2_sp=23.0, average=0.7)
    with pytest.raises(
        ConfigError, match="--rates size is no longer there, and this run has it: start it anew"
    ):
        Options.from_dict(older | {"rates": "size"})


def test_a_run_is_to_be_good_at_what_it_is_tuned_for():
    assert Options(precisions=(M8, M3)).tuned_for == (M8, M3)
    assert Options(method="otaro").tuned_for == PRECISIONS == BEST.tuned_for  # though not all are drawn
    assert Options(method="fixed:E5M4").tuned_for == (M4,)
    assert Options(method="fp").tuned_for == (None,)


def test_to_dict_is_a_copy():
    options = Options()
    options.to_dict()["method"] = "fp"
    assert options.method == "uniform"


# Other precisions -------------------------------------------------------------------------------------------


def test_other_precisions_keep_their_own_weights():
    options = with_precisions(BEST, ["E5M8", "E5M4"])
    assert (options.precisions, options.weights) == ((M8, M4), (0.0, 1.25))
    assert dataclasses.replace(options, precisions=PRECISIONS, weights=BEST.weights) == BEST


def test_precisions_that_are_never_drawn_among_others_are_drawn_alike_among_themselves():
    assert with_precisions(BEST, ["E5M8", "E5M7"]).weights is None


def test_the_same_precisions_keep_their_weights():
    assert with_precisions(BEST, [str(p) for p in PRECISIONS]) == BEST
    assert with_precisions(Options(), ["E5M8", "E5M4"]).weights is None


def test_naming_precisions_in_another_order_does_not_move_weights_to_others():
    options = with_precisions(BEST, [str(p) for p in reversed(PRECISIONS)])
    assert dict(zip(options.precisions, options.weights, strict=True))[M3] == 2.6


def test_precisions_named_twice_or_not_existing_are_refused():
    with pytest.raises(ConfigError, match="--precisions"):
        with_precisions(Options(), ["E5M8", "E5M8"])
    with pytest.raises(ConfigError, match="--precisions"):
        with_precisions(Options(), [])
    with pytest.raises(OtaroError, match="E5M9"):
        with_precisions(Options(), ["E5M8", "E5M9"])
