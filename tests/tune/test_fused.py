"""The GPU's kernel for many weights gives the very values of the codec.

It runs on a GPU, or by Triton's interpreter on the CPU: that one has to be chosen before Triton is imported,
so the last test runs this file once more in a process of its own.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from otaro import encode
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune.accumulate import GradientAccumulator
from otaro.tune.fake_quant import Precisely, prepare, quantize
from otaro.tune.steady import Anchor, WeightAverage

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not here: set-up brings it on Linux x86-64"
)


@pytest.fixture
def device() -> str:
    """Where the kernel runs."""
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter")
    return "cuda"


SIZES = {"a": 1_000_000, "b": 7}
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 128), (576, 1536), (49, 576), (2, 3, 192), (1, 4096), (4097, 64)]
if INTERPRETED:  # a tile takes milliseconds
    SHAPES = [(1, 64), (3, 128), (67, 64), (22, 192), (2, 3, 192), (1, 1024), (3, 64)]


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for n, shape in enumerate(SHAPES):
        spread = torch.randint(-(n * 3), n * 3 + 1, shape, generator=generator)
        values = torch.randn(shape, generator=generator) * 2.0 ** spread.clamp(-20, 8)
        values[..., 0] = torch.tensor([0.0, -0.0, 0.96, -0.96, 2.0**-24, -(2.0**-17), 1.0])[n]
        made.append(values.to(dtype))
    return [*made, torch.zeros(5, 64, dtype=dtype), *(edges() if dtype == torch.float32 else ())]


def edges() -> list[torch.Tensor]:
    """Groups that just fit their scale, or just do not; weights on borders of cells, and beside them; far
    smaller ones.
    """

    def neighbours(numbers: torch.Tensor) -> torch.Tensor:
        up, down = (torch.nextafter(numbers, torch.full_like(numbers, end)) for end in (torch.inf, 0.0))
        return torch.stack([down, numbers, up, -down, -numbers, -up])

    float8 = torch.arange(8.0, 16.0)
    ends = neighbours(torch.cat([float8 * 15, float8 * 17]) / 2.0**8).reshape(-1, 1)
    alone, beside = torch.zeros(2, len(ends), 64)
    alone[:, :1], beside[:, 1:2], beside[:, 2:3] = ends, ends * (17 / 16), ends * -(15 / 16)
    borders = neighbours(torch.arange(1.0, 65.0) * 13 / 2.0**10).reshape(-1, 64)
    borders[:, 7] = torch.tensor([-17.0, 17.0, -15.0, -16.5, 16.0, 16.9]) * 13 / 2.0**8
    far = torch.randn(32, 64, generator=torch.Generator().manual_seed(9)) * 2.0 ** -torch.arange(
        0, 64, 2
    ).unsqueeze(-1)
    far[3, 5:9] = torch.tensor([1e-45, -1e-45, 1e-39, -1e-39])
    return [alone, beside, borders, far]


@needs_triton
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_of_all_weights_are_those_of_the_codec(dtype, precision, reconstruction, device):
    from otaro.tune.fused import BEST, Launch, quantize_all, serves

    given = weights(dtype)
    there = [weight.to(device) for weight in given]
    launches = [(32, BEST), (64, BEST), (64, Launch(1024, 2))]
    # launches take turns: each precision has all of them with some type, and each type with some precision
    if INTERPRETED:
        turn = PRECISIONS.index(precision) + TYPES.index(dtype)
        launches = [launches[turn % len(launches)]]
    for group_size, launch in launches:
        assert all(serves(weight, group_size) for weight in there)
        for out in (torch.float32,) if INTERPRETED else (dtype, torch.float32, torch.bfloat16):
            found = quantize_all(there, precision.mantissa_bits, group_size, reconstruction, out, launch)
            for weight, values in zip(given, found, strict=True):
                expected = encode(weight, group_size, reconstruction).decode(precision).to(out)
                assert values.shape == weight.shape
                bits = torch.int32 if out == torch.float32 else torch.int16
                assert torch.equal(values.cpu().view(bits), expected.view(bits))


@needs_triton
def test_small_parts_are_quantized_as_in_the_whole(reconstruction, device):
    from otaro.tune.fused import quantize_all, scale_exponents_of

    given = weights(torch.float32)
    found = scale_exponents_of([weight.to(device) for weight in given], 64, reconstruction)
    assert found.tolist() == [encode(weight, 64, reconstruction).scale_exponent for weight in given]
    whole = given[-1].to(device)
    expected = encode(given[-1], 64, reconstruction).decode("E5M8")
    for start in (0, 9):
        part = quantize_all(
            [whole[start:]], 8, 64, reconstruction, torch.float32, scale_exponents=found[-1:]
        )[0]
        assert torch.equal(part.cpu(), expected[start:])
    assert not torch.equal(
        quantize_all([whole[9:]], 8, 64, reconstruction, torch.float32)[0].cpu(), expected[9:]
    )


@needs_triton
def test_small_weights_to_another_type(reconstruction, device):
    from otaro.tune.fused import quantize_all

    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    # the interpreter cuts off for bfloat16
    for out in (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16):
        found = quantize_all([weight.to(device)], 4, 64, reconstruction, out)[0]
        assert torch.equal(found.cpu(), quantize(weight, 4, 64, reconstruction).to(out))


@needs_triton
def test_nan_stays_nan(reconstruction, device):
    from otaro.tune.fused import quantize_all

    weight = torch.ones(1, 64, device=device)
    weight[0, 3] = torch.nan
    assert quantize_all([weight], 4, 64, reconstruction, torch.float32)[0][0, 3].isnan()


@needs_triton
def test_what_the_kernel_cannot_load_whole_is_left_to_the_plain_computation(device):
    from otaro.tune.fused import serves

    stretch = torch.zeros(3 * 64, device=device)
    assert serves(stretch[4:68].view(1, 64), 64)  # 16 bytes further
    assert not serves(stretch[1:65].view(1, 64), 64)  # between addresses of 16 bytes
    assert not serves(torch.zeros(2, 96, device=device), 64)  # ends in half a group
    assert not serves(torch.zeros(64, 2, device=device).T, 64)  # runs across
    assert not serves(torch.zeros(0, 64, device=device), 64)


@needs_gpu
def test_a_short_last_group_is_left_to_the_plain_computation():
    weight = torch.randn(7, 70)
    assert torch.equal(quantize(weight.cuda(), 4, 64, "midpoint").cpu(), quantize(weight, 4, 64, "midpoint"))


@needs_gpu
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_gradients_on_the_gpu_are_those_of_the_cpu(name, make_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(name), dtype=torch.float32)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients = []
    for device in ("cpu", "cuda"):
        precisely, trained = Precisely(), copy.deepcopy(model).to(device)
        prepare(trained, precisely)
        with precisely.at(Precision("E5M4")):
            trained(input_ids=ids.to(device), labels=ids.to(device)).loss.backward()
        gradients.append({name: p.grad.cpu() for name, p in trained.named_parameters()})
    # Sums of float32 in another order cancel differently, so small ones are judged by the largest of their
    # tensor. A quantizer that errs shows in percents: a step of E5M4 is a sixteenth of a group's scale.
    for key, gradient in gradients[0].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-3 * largest, rtol=1e-3)


@needs_gpu
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_in_host_memory_are_those_on_the_gpu(reduction):
    here, there = (GradientAccumulator(3, reduction, place) for place in ("device", "host"))
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = {name: torch.randn(size, generator=generator) for name, size in (("a", 1_000_000), ("b", 7))}
        for accumulator in (here, there):
            accumulator.add({name: gradient.cuda() for name, gradient in batch.items()})
        assert all(tensor.device.type == "cpu" for tensor in there.tensors().values())
        assert all(
            torch.equal(there.tensors()[name], tensor.cpu()) for name, tensor in here.tensors().items()
        )
    devices = {name: torch.device("cuda") for name in ("a", "b")}
    one, other = here.take(devices), there.take(devices)
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_gpu
def test_an_anchor_and_an_average_in_host_memory_are_those_on_the_gpu():
    ended = []
    for on_host in (False, True):
        generator = torch.Generator().manual_seed(5)
        weights = {
            name: torch.nn.Parameter(torch.randn(size, generator=generator).cuda())
            for name, size in SIZES.items()
        }
        anchor, average = Anchor(weights, 0.3, on_host), WeightAverage(0.8, on_host)
        for step in range(5):
            for parameter in weights.values():
                parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).cuda()
            anchor.apply(weights, 0.1)
            average.add(weights, step + 1, 5)
        assert {tensor.is_cuda for tensor in average.tensors().values()} == {not on_host}
        kept = {name: tensor.cpu() for name, tensor in average.tensors().items()}
        average.restore(average.count, kept, dict.fromkeys(SIZES, torch.device("cuda")))
        average.swap(weights)
        ended.append({name: weight.detach().cpu() for name, weight in weights.items()})
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in SIZES)


@needs_gpu
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_gradients_of_weights_that_are_made_again_are_those_of_held_ones_on_the_gpu(bf16, make_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama_tied"), dtype=torch.float32).cuda()
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for hold in (True, False):
        precisely, trained = Precisely(), copy.deepcopy(model)
        precisely.hold = hold
        prepare(trained, precisely)
        dtype = torch.bfloat16 if bf16 else None
        with precisely.at(Precision("E5M4"), dtype), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            trained(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in trained.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=2.0**-7 if bf16 else 1e-5)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter already")
def test_by_tritons_interpreter():
    chosen = "not gradients and not sums and not anchor"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "TRITON_INTERPRET" not in done.stdout  # as tests say that were skipped for want of it
