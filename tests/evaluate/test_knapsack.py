"""The solver against all choices there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otaro.evaluate import knapsack
from otaro.evaluate.knapsack import Knapsack

_LOSS = st.integers(0, 1000).map(lambda value: value / 64)  # sums are exact in any order
_ITEMS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(_LOSS, min_size=1, max_size=4)), min_size=1, max_size=5
)


def _least(items: list[tuple[int, list[float]]], capacity: int) -> float:
    """By trying all choices."""
    return min(
        sum(losses[option] for option, (_, losses) in zip(options, items, strict=True))
        for options in product(*(range(len(losses)) for _, losses in items))
        if sum(option * size for option, (size, _) in zip(options, items, strict=True)) <= capacity
    )


@given(_ITEMS, st.integers(0, 400))
def test_is_the_best_of_all_choices(items: list[tuple[int, list[float]]], capacity: int) -> None:
    sizes, losses = [size for size, _ in items], [loss for _, loss in items]
    problem = Knapsack(sizes, losses)
    found = problem.solve(capacity)
    assert problem.exact
    assert found.loss == _least(items, capacity)
    assert found.loss == sum(loss[option] for option, loss in zip(found.options, losses, strict=True))
    assert (
        found.cost
        == sum(option * size for option, size in zip(found.options, sizes, strict=True))
        <= capacity
    )


@given(_ITEMS, st.integers(0, 400))
def test_rounded_sizes_fit(items: list[tuple[int, list[float]]], capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_MOST_UNITS", 7)
        problem = Knapsack([size for size, _ in items], [loss for _, loss in items])
    found, least = problem.solve(capacity), _least(items, capacity)
    assert found.cost <= capacity
    assert least <= found.loss


def test_sizes_of_a_real_model_are_exact() -> None:
    # SmolLM2-135M, bytes of a plane
    sizes = [*([41472, 13824, 13824, 41472, 110592, 110592, 110592] * 30), 3538944]
    losses = [[4.0**-option * (1 + number % 5) for option in range(6)] for number in range(len(sizes))]
    problem = Knapsack(sizes, losses)
    assert problem.exact
    half = problem.solve(sum(sizes) // 2)
    assert sum(losses[number][0] for number in range(len(sizes))) > half.loss > problem.solve(sum(sizes)).loss
