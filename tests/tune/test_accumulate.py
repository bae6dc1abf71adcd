"""The accumulator of delayed gradients, and the law of equation 17 that it rests on."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from otaro.tune.accumulate import GradientAccumulator

CPU = torch.device("cpu")
DEVICES = {"a": CPU, "b": CPU, "late": CPU, "never": CPU}
SIZES = (1, 4, 16, 64, 256)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(count)
    shapes = {"a": (3, 5), "b": (7,)}
    return [
        {name: torch.randint(-99, 99, shape, generator=generator).float() for name, shape in shapes.items()}
        for _ in range(count)
    ]


def sums(gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([batch[name] for batch in gradients]).sum(0) for name in gradients[0]}


def copy(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # the accumulator keeps what it is given
    return {name: gradient.clone() for name, gradient in batch.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("delay", [1, 2, 10])
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_sum_is_exact(delay, place):
    accumulator = GradientAccumulator(delay, "sum", place)
    given = batches(delay)
    for batch in given:
        accumulator.add(copy(batch))
    assert_same(accumulator.take(DEVICES), sums(given))


@pytest.mark.parametrize("place", ["device", "host"])
def test_the_mean_is_the_sum_divided_once(place):
    accumulator = GradientAccumulator(10, "mean", place)
    given = batches(10)
    for batch in given:
        accumulator.add(copy(batch))
    assert_same(accumulator.take(DEVICES), {name: total / 10 for name, total in sums(given).items()})


def test_the_mean_of_a_leftover_divides_by_what_came_not_by_the_delay():
    accumulator = GradientAccumulator(10, "mean")
    given = batches(3)
    for batch in given:
        accumulator.add(copy(batch))
    assert_same(accumulator.take(DEVICES), {name: total / 3 for name, total in sums(given).items()})


@pytest.mark.parametrize("delay", [1, 3, 10])
def test_add_says_true_exactly_at_the_nth_batch_and_again_n_later(delay):
    accumulator = GradientAccumulator(delay)
    said = []
    for batch in batches(3 * delay):
        said.append(accumulator.add(batch))
        if said[-1]:
            assert accumulator.count == delay
            accumulator.take(DEVICES)
    assert said == ([False] * (delay - 1) + [True]) * 3


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_it_starts_anew_after_take(reduction):
    accumulator = GradientAccumulator(2, reduction)
    first, second, third, fourth = batches(4)
    accumulator.add(copy(first))
    accumulator.add(copy(second))
    taken = accumulator.take(DEVICES)
    kept = copy(taken)
    assert accumulator.count == 0
    assert accumulator.tensors() == {}
    accumulator.add(copy(third))
    accumulator.add(copy(fourth))
    share = 1 if reduction == "sum" else 2
    assert_same(
        accumulator.take(DEVICES), {name: total / share for name, total in sums([third, fourth]).items()}
    )
    assert_same(taken, kept)  # what was handed out is no longer the accumulator's


def test_taking_from_an_empty_accumulator_gives_nothing():
    for reduction in ("sum", "mean"):
        assert GradientAccumulator(3, reduction).take(DEVICES) == {}


def test_gradients_survive_other_steps_in_between():
    """As the trainer does it: the parameter gives its gradient away, and steps go on with their own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    accumulator = GradientAccumulator(4)
    withheld, finished = [], []
    for batch in range(12):
        model(torch.randn(5, 6)).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if batch % 3 == 0:
            withheld.append(copy(gradients))
            model.zero_grad()
            finished.append(accumulator.add(gradients))
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
    assert finished == [False, False, False, True]
    running = {name: gradient.clone() for name, gradient in withheld[0].items()}
    for gradients in withheld[1:]:
        for name, gradient in gradients.items():
            running[name] += gradient
    assert_same(accumulator.take(dict.fromkeys(running, CPU)), running)


def test_parameters_without_a_gradient_in_some_batches_still_add_up():
    """An expert that no token reached has none; in the mean it counts as zero."""
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    for reduction, share in (("sum", 1), ("mean", 4)):
        accumulator = GradientAccumulator(4, reduction)
        accumulator.add({"a": one.clone()})
        accumulator.add({})
        accumulator.add({"a": two.clone(), "late": one.clone()})
        assert accumulator.add({"late": two.clone()})
        assert_same(accumulator.take(DEVICES), {"a": (one + two) / share, "late": (one + two) / share})


def test_what_is_collected_carries_no_graph():
    accumulator = GradientAccumulator(2)
    leaf = torch.ones(3, requires_grad=True)
    accumulator.add({"a": leaf * 2})
    accumulator.add({"a": leaf * 3})
    taken = accumulator.take(DEVICES)["a"]
    assert not taken.requires_grad
    assert taken.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(("place", "kept_on"), [("host", "cpu"), ("device", "meta")])
def test_the_place_decides_where_tensors_are_kept(place, kept_on):
    """The meta device stands for any but the host; nothing can be copied out of it: the host has its own."""
    accumulator = GradientAccumulator(3, place=place)
    accumulator.restore(1, {"a": torch.ones(2)}, {"a": torch.device("meta")})
    assert accumulator.tensors()["a"].device.type == kept_on
    accumulator.add({"a": torch.ones(2, device=kept_on)})
    assert accumulator.tensors()["a"].device.type == kept_on
    assert accumulator.take({"a": torch.device("meta")})["a"].device.type == "meta"


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_safetensors_goes_on_where_it_stopped(tmp_path, place, reduction, dtype):
    given = [{name: gradient.to(dtype) / 7 for name, gradient in batch.items()} for batch in batches(5)]
    straight = GradientAccumulator(5, reduction, place)
    for batch in given[:3]:
        straight.add(copy(batch))
    save_file(straight.tensors(), tmp_path / "accumulator.safetensors")
    resumed = GradientAccumulator(5, reduction, place)
    resumed.restore(straight.count, load_file(tmp_path / "accumulator.safetensors"), DEVICES)
    for batch, finished in zip(given[3:], (False, True), strict=True):
        assert straight.add(copy(batch)) is finished
        assert resumed.add(copy(batch)) is finished
    assert_same(resumed.take(DEVICES), straight.take(DEVICES))


def test_restoring_forgets_what_was_collected_before():
    accumulator = GradientAccumulator(5)
    accumulator.add({"never": torch.ones(2)})
    accumulator.restore(2, {"a": torch.full((2,), 3.0)}, DEVICES)
    assert accumulator.count == 2
    assert_same(accumulator.take(DEVICES), {"a": torch.full((2,), 3.0)})


# Equation 17 ------------------------------------------------------------------------------------------------

WIDTH = 4096


def perturbations(shared: float) -> list[float]:
    """|| sum of noise || / || sum of signal || as the accumulator leaves it, for the SIZES; `shared` of the
    variance of the noise is the same in all batches."""
    generator = torch.Generator().manual_seed(17)
    signal = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    ratios = []
    for size in SIZES:
        accumulator = GradientAccumulator(size)
        common = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        for batch in range(1, size + 1):
            own = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
            noise = 3.0 * (math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
            assert accumulator.add({"a": signal + noise}) is (batch == size)
        perturbed = accumulator.take(DEVICES)["a"]
        ratios.append(float((perturbed - size * signal).norm() / (size * signal).norm()))
    return ratios


def exponent(ratios: list[float]) -> float:
    """The slope of log ratio over log N, by least squares."""
    x, y = [math.log(size) for size in SIZES], [math.log(ratio) for ratio in ratios]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - middle_x) ** 2 for a in x)


# The norm of WIDTH normal numbers scatters by 1/sqrt(2 WIDTH) of itself; least squares divide that by the
# spread of log N.
SCATTER = 1 / math.sqrt(2 * WIDTH) / math.sqrt(sum((math.log(size) - math.log(16)) ** 2 for size in SIZES))


def test_independent_noise_shrinks_as_one_over_the_square_root_of_n():
    assert exponent(perturbations(shared=0.0)) == pytest.approx(-0.5, abs=5 * SCATTER)
    assert 5 * SCATTER < 0.02  # or the bound would prove nothing


def test_noise_that_all_batches_share_does_not_shrink_at_all():
    assert exponent(perturbations(shared=1.0)) == pytest.approx(0.0, abs=5 * SCATTER)


def test_partly_shared_noise_stops_shrinking_at_its_shared_part():
    ratios = perturbations(shared=0.5)
    assert ratios[-1] / ratios[0] == pytest.approx(math.sqrt(0.5 + 0.5 / 256), rel=0.05)
    assert exponent(ratios) > -0.1
