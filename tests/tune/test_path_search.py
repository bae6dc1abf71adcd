"""The four searches: scores worked out by hand, the long run of the paper's equations 6 to 9, resuming."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest

from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune.path_search import BitWidthPathSearch, FixedSearch, UniformSearch

M8, M7, M6, M5, M4, M3 = PRECISIONS
# Higher at lower precisions, as the paper supposes.
LOSSES = {M8: 2.0, M7: 2.1, M6: 2.3, M5: 2.6, M4: 3.2, M3: 4.5}


def walk(search, losses, steps: int) -> list[Precision]:
    """Let a search choose for some steps; the loss at a precision is constant or a function of its batch."""
    path = []
    for step in range(steps):
        path.append(search.choose())
        loss = losses[path[-1]]
        search.record(path[-1], loss(step) if callable(loss) else loss)
    return path


def through_json(search, fresh):
    """The fresh search, going on from the state of the first."""
    fresh.load_state_dict(json.loads(json.dumps(search.state_dict())))
    return fresh


def drifting(step: int) -> float:
    """A loss that wanders, so that a path depends on the very last one seen."""
    return 2.5 + math.sin(step * 1.7)


# The paper's search -----------------------------------------------------------------------------------------


def test_scores_and_choices_are_those_worked_out_by_hand():
    search = BitWidthPathSearch([M8, M4], exploration=5.0)
    assert search.scores() == {"E5M8": None, "E5M4": None}
    # Batch 1 and 2 are the first visits.
    assert search.choose() == M8
    search.record(M8, 2.0)
    # sqrt(ln 2) = 0.832555
    assert search.scores() == {"E5M8": pytest.approx(5 * 0.832555 - 2.0, abs=1e-5), "E5M4": None}
    assert search.choose() == M4
    search.record(M4, 3.0)
    # Batch 3: sqrt(ln 3 / 1) = 1.048147 for both, so the lower loss decides: 3.240735 against 2.240735.
    assert search.scores() == {
        "E5M8": pytest.approx(3.240735, abs=1e-5),
        "E5M4": pytest.approx(2.240735, abs=1e-5),
    }
    assert search.choose() == M8
    search.record(M8, 1.5)
    # Batch 4: E5M8 5 sqrt(1.386294 / 2) - 1.5 = 4.162773 - 1.5, E5M4 5 sqrt(1.386294 / 1) - 3 = 5.887050 - 3.
    assert search.scores() == {
        "E5M8": pytest.approx(2.662773, abs=1e-5),
        "E5M4": pytest.approx(2.887050, abs=1e-5),
    }
    assert search.choose() == M4
    search.record(M4, 2.5)
    # Batch 5: sqrt(1.609438 / 2) = 0.897061 for both; the loss of E5M4 is the last one, 2.5, no mean with the
    # earlier 3.0.
    assert search.scores() == {
        "E5M8": pytest.approx(2.985307, abs=1e-5),
        "E5M4": pytest.approx(1.985307, abs=1e-5),
    }
    assert search.choose() == M8


@pytest.mark.parametrize("exploration", [0.0, 0.3, 5.0, 100.0])
def test_the_path_is_that_of_a_plain_reading_of_equation_5(exploration):
    """Recomputed from the path alone: counts, last losses and t from 1."""
    losses = {
        precision: (lambda step, base=base: base + 0.4 * math.sin(step)) for precision, base in LOSSES.items()
    }
    path = walk(BitWidthPathSearch(PRECISIONS, exploration), losses, 300)
    for t, chosen in enumerate(path, start=1):
        before = path[: t - 1]
        unseen = [p for p in PRECISIONS if p not in before]
        if unseen:
            assert chosen == unseen[0]
            continue
        last = {p: t - 2 - before[::-1].index(p) for p in PRECISIONS}
        score = {
            p: exploration * math.sqrt(math.log(t) / before.count(p)) - losses[p](last[p]) for p in PRECISIONS
        }
        assert score[chosen] == max(score.values()), f"batch {t}"


def test_first_visits_go_from_the_finest_to_the_coarsest_whatever_the_losses():
    for losses in (LOSSES, {p: -loss for p, loss in LOSSES.items()}, dict.fromkeys(PRECISIONS, 0.0)):
        assert walk(BitWidthPathSearch(PRECISIONS, 5.0), losses, 6) == list(PRECISIONS)


def test_ties_go_to_the_finer_precision():
    path = walk(BitWidthPathSearch([M3, M6, M8], 5.0), dict.fromkeys(PRECISIONS, 1.0), 9)
    assert path == [M8, M6, M3] * 3


def test_the_order_in_which_precisions_are_given_does_not_matter():
    paths = [
        walk(BitWidthPathSearch(order, 5.0), LOSSES, 200)
        for order in (PRECISIONS, PRECISIONS[::-1], [M5, M3, M8, M6, M4, M7], [*PRECISIONS, M8])
    ]
    assert paths[1:] == paths[:1] * 3


def test_choosing_and_looking_at_scores_changes_nothing():
    search = BitWidthPathSearch(PRECISIONS, 5.0)
    walk(search, LOSSES, 20)
    before = search.state_dict(), search.scores()
    assert search.choose() == search.choose()
    assert (search.state_dict(), search.scores()) == before


@pytest.mark.parametrize("stop", [0, 1, 4, 6, 57])
def test_a_resumed_search_walks_the_identical_path(stop):
    losses = dict.fromkeys(PRECISIONS, drifting)
    straight = BitWidthPathSearch(PRECISIONS, 5.0)
    walk(straight, losses, stop)
    resumed = through_json(straight, BitWidthPathSearch(PRECISIONS[::-1], 5.0))
    assert resumed.scores() == straight.scores()
    assert walk(resumed, losses, 200) == walk(straight, losses, 200)
    assert resumed.scores() == straight.scores()


def test_a_state_is_a_snapshot_that_later_batches_leave_alone():
    search = BitWidthPathSearch(PRECISIONS, 5.0)
    walk(search, LOSSES, 10)
    state = search.state_dict()
    kept = json.dumps(state)
    walk(search, LOSSES, 10)
    assert json.dumps(state) == kept


# Equations 6 to 9 -------------------------------------------------------------------------------------------


def test_finer_precisions_are_chosen_more_often_and_ever_more_so_as_t_grows():
    path = walk(BitWidthPathSearch(PRECISIONS, 5.0), LOSSES, 20_000)
    counts = [Counter(path)[p] for p in PRECISIONS]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 6
    windows = [Counter(path[start:end]) for start, end in ((0, 200), (200, 2_000), (2_000, 20_000))]
    shares = [window[M8] / window.total() for window in windows]
    assert shares[0] < shares[1] < shares[2]
    assert shares[0] < 0.5 < shares[2]
    coarsest = [window[M3] / window.total() for window in windows]
    assert coarsest[0] > 2 * coarsest[1] > 4 * coarsest[2] > 0  # rarer and rarer, but never given up


def test_the_score_gap_tends_to_the_loss_gap_where_counts_grow_linearly():
    """Equation 7 with t_h = 2t/3 and t_l = t/3: beside the loss gap a term falls as sqrt(ln t / t)."""
    deviations = []
    for t in (3 * 10**2, 3 * 10**4, 3 * 10**6, 3 * 10**8):
        search = BitWidthPathSearch([M8, M3], 5.0)
        losses = {"E5M8": LOSSES[M8], "E5M3": LOSSES[M3]}
        search.load_state_dict({"counts": {"E5M8": 2 * t // 3 - 1, "E5M3": t // 3}, "losses": losses})
        scores = search.scores()
        deviations.append(scores["E5M8"] - scores["E5M3"] - (LOSSES[M3] - LOSSES[M8]))
        assert deviations[-1] == pytest.approx(
            5 * (math.sqrt(1.5) - math.sqrt(3)) * math.sqrt(math.log(t) / t), rel=0.01
        )
    assert all(abs(later) < abs(earlier) / 5 for earlier, later in pairwise(deviations))
    assert abs(deviations[-1]) < 1e-3


def test_on_its_own_path_the_search_draws_scores_level_instead():
    """Equation 9 supposes counts that grow linearly. The search itself, always taking the highest score,
    levels the scores: a precision's exploration makes up for its loss, and its count grows as ln t only."""
    search = BitWidthPathSearch(PRECISIONS, 5.0)
    walk(search, LOSSES, 20_000)
    scores = search.scores().values()
    assert max(scores) - min(scores) < 0.1 < LOSSES[M3] - LOSSES[M8]


def test_with_a_large_lambda_exploration_dominates():
    counts = Counter(walk(BitWidthPathSearch(PRECISIONS, 1e6), LOSSES, 1_000))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert counts.total() == 1_000


def test_with_lambda_zero_only_the_last_losses_count():
    path = walk(BitWidthPathSearch(PRECISIONS, 0.0), LOSSES, 100)
    assert path[6:] == [M8] * 94
    search = BitWidthPathSearch([M8, M4], 0.0)
    walk(search, {M8: 2.0, M4: 3.0}, 2)
    search.record(M8, 3.5)  # now E5M4 looks better, however often E5M8 was
    assert search.choose() == M4


# The others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, (1.0, 1.0, 1.0, 1.0, 1.5, 2.0), (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)])
def test_uniform_draws_as_often_as_the_weights_say(weights):
    draws, parts = 12_000, weights or (1.0,) * 6
    counts = Counter(walk(UniformSearch(PRECISIONS, weights, seed=1), LOSSES, draws))
    expected = {p: draws * part / sum(parts) for p, part in zip(PRECISIONS, parts, strict=True)}
    chi_square = sum((counts[p] - expected[p]) ** 2 / expected[p] for p in PRECISIONS)
    assert chi_square < 20.5  # exceeded once in a thousand by chance, with 5 degrees of freedom


def test_uniform_scores_are_the_probabilities():
    scores = UniformSearch([M8, M4, M3], (1.0, 1.0, 2.0), seed=0).scores()
    assert scores == {"E5M8": 0.25, "E5M4": 0.25, "E5M3": 0.5}


def test_uniform_weights_follow_the_order_of_the_precisions():
    assert set(walk(UniformSearch([M3, M8], (1.0, 0.0), seed=0), LOSSES, 50)) == {M3}


def test_uniform_never_draws_a_precision_of_weight_zero():
    counts = Counter(walk(UniformSearch(PRECISIONS, (1.0, 0.0, 1.0, 0.0, 1.0, 0.0), seed=3), LOSSES, 5_000))
    assert set(counts) == {M8, M6, M4}


def test_uniform_takes_the_same_path_for_the_same_seed_and_another_for_another():
    one, same, other = (walk(UniformSearch(PRECISIONS, None, seed), LOSSES, 100) for seed in (7, 7, 8))
    assert one == same != other


@pytest.mark.parametrize("stop", [0, 1, 33])
def test_a_resumed_uniform_search_goes_on_with_the_same_draws(stop):
    weights = (1.0, 1.0, 1.0, 1.0, 1.5, 2.0)
    straight = UniformSearch(PRECISIONS, weights, seed=5)
    walk(straight, LOSSES, stop)
    resumed = through_json(straight, UniformSearch(PRECISIONS, weights, seed=999))
    assert walk(resumed, LOSSES, 2_000) == walk(straight, LOSSES, 2_000)


def test_losses_do_not_sway_the_uniform_search():
    high, low = (
        walk(UniformSearch(PRECISIONS, None, 0), dict.fromkeys(PRECISIONS, loss), 100) for loss in (9.0, 0.1)
    )
    assert high == low


@pytest.mark.parametrize("precision", [M4, None], ids=["fixed", "fp"])
def test_fixed_and_full_precision_never_change(precision):
    search = FixedSearch(precision)
    assert walk(search, {precision: drifting}, 50) == [precision] * 50
    assert search.scores() == {}
    assert through_json(search, FixedSearch(precision)).choose() == precision
