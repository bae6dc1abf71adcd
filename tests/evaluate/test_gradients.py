"""Gradients at every precision against the plain way to compute them, and the statistics against cases with
known answers.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import OtaroError
from otaro.evaluate.gradients import ROWS, GradientTally, analyze_gradients, place
from otaro.file.checkpoint import Checkpoint
from otaro.tune.fake_quant import Precisely, prepare

NAMES = [str(p) for p in otaro.PRECISIONS]
GROUP_SIZE = 32


def opened(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), list(
        Checkpoint(directory).packed
    )


def batches_of(count, length=12, size=2):
    ids = torch.randint(0, 120, (count, size, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": some, "labels": some} for some in ids]


def one_by_one(directory, batches, reconstruction, as_packed=lambda name, weight: weight):
    """[batch][row][name]: gradients of models made afresh for each precision."""
    found = []
    for batch in batches:
        rows = []
        for precision in ROWS:
            model, packed = opened(directory)
            parameters = [model.get_parameter(name) for name in packed]
            if precision is not None:
                for name, parameter in zip(packed, parameters, strict=True):
                    codes = otaro.encode(as_packed(name, parameter.data), GROUP_SIZE, reconstruction)
                    parameter.data = as_packed(name, codes.decode(precision))
            rows.append(dict(zip(packed, torch.autograd.grad(model(**batch).loss, parameters), strict=True)))
        found.append(rows)
    return found


@pytest.fixture
def seen(monkeypatch):
    """The gradients that reach the tally, batch by batch."""
    kept = []
    add = GradientTally.add

    def spy(self, found):
        kept.append({name: rows.clone() for name, rows in found.items()})
        add(self, found)

    monkeypatch.setattr(GradientTally, "add", spy)
    return kept


@pytest.mark.parametrize(
    ("architecture", "reconstruction"),
    [("llama", "midpoint"), ("llama_tied", "truncate"), ("mixtral", "midpoint"), ("gpt2", "midpoint")],
)
def test_gradients_are_those_of_models_that_hold_the_decoded_weights(
    make_checkpoint, as_packed, seen, architecture, reconstruction
):
    directory, batches = make_checkpoint(architecture), batches_of(2)
    model, packed = opened(directory)
    analyze_gradients(model, packed, batches, group_size=GROUP_SIZE, reconstruction=reconstruction)
    for found, expected in zip(seen, one_by_one(directory, batches, reconstruction, as_packed), strict=True):
        assert list(found) == packed
        for name in packed:
            assert torch.equal(found[name], torch.stack([row[name].flatten() for row in expected]))


def test_they_are_the_straight_through_gradients_of_tuning(checkpoint_dir, seen):
    (batch,) = batches_of(1)
    model, packed = opened(checkpoint_dir)
    analyze_gradients(model, packed, [batch])
    precisely = Precisely()
    prepare(model, precisely)
    for row, precision in enumerate(ROWS):
        with precisely.at(precision):
            model.zero_grad()
            model(**batch).loss.backward()
        for name in packed:
            torch.testing.assert_close(
                seen[0][name][row], model.get_parameter(name).grad.flatten(), rtol=1e-4, atol=1e-6
            )


def test_the_summary_says_of_the_gradients_what_a_plain_computation_says(checkpoint_dir):
    batches = batches_of(3)
    model, packed = opened(checkpoint_dir)
    result = analyze_gradients(model, packed, batches, group_size=GROUP_SIZE)
    expected = one_by_one(checkpoint_dir, batches, "midpoint")
    rows = {  # [7, batches, entries]
        name: torch.stack(
            [torch.stack([found[row][name].flatten() for found in expected]) for row in range(7)]
        ).double()
        for name in packed
    }

    def cosines(vectors):
        units = torch.nn.functional.normalize(vectors.flatten(1), dim=1)
        return units @ units.T

    assert result["precisions"] == NAMES
    assert [module["module"] + ".weight" for module in result["modules"]] == packed
    for module in result["modules"]:
        direct = cosines(rows[module["module"] + ".weight"])
        matrix = torch.tensor(module["matrix"], dtype=torch.float64)
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix.diagonal(), torch.ones(6, dtype=torch.float64))
        torch.testing.assert_close(matrix, direct[1:, 1:], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            torch.tensor(module["to_fp"], dtype=torch.float64), direct[0, 1:], rtol=1e-9, atol=1e-9
        )
    together = torch.cat(list(rows.values()), 2)
    torch.testing.assert_close(
        torch.tensor(result["overall"], dtype=torch.float64), cosines(together)[1:, 1:]
    )

    norms = together.norm(dim=2)
    full = together[0].flatten().unsqueeze(1)
    for row, name in enumerate(NAMES, 1):
        assert result["norm_error"][name] == pytest.approx(
            ((norms[row] - norms[0]) / norms[0]).tolist(), abs=1e-9
        )
        fit, noise = result["fit"][name], result["noise"][name]
        x = float(torch.linalg.lstsq(full, together[row].flatten().unsqueeze(1)).solution)
        y = together[row] - x * together[0]
        assert fit["x"] == pytest.approx(x)
        assert fit["y_share"] == pytest.approx(float(y.norm() / full.norm()), rel=1e-5)
        assert noise["n"] == [1, 2, 3]
        sums = [(float(y[:n].sum(0).norm()), float(together[0, :n].sum(0).norm())) for n in noise["n"]]
        assert noise["ratio"] == pytest.approx([of_y / of_f for of_y, of_f in sums], rel=1e-5)


def test_modules_have_their_layer_and_projection(checkpoint_dir):
    model, packed = opened(checkpoint_dir)
    result = analyze_gradients(model, packed, batches_of(1), modules="*.layers.1.*")
    assert {(module["layer"], module["projection"]) for module in result["modules"]} == {
        (1, f"self_attn.{letter}_proj") for letter in "qkvo"
    } | {(1, f"mlp.{kind}_proj") for kind in ("gate", "up", "down")}
    everything = analyze_gradients(model, packed, batches_of(1))
    outside = {module["projection"] for module in everything["modules"] if module["layer"] is None}
    assert outside == {"embed_tokens", "lm_head"}
    same = {module["module"]: module["matrix"] for module in everything["modules"]}
    for module in result["modules"]:  # looking at fewer modules does not change what they are compared at
        torch.testing.assert_close(
            torch.tensor(module["matrix"]), torch.tensor(same[module["module"]]), rtol=1e-6, atol=1e-6
        )


def synthetic(make_y, batches, entries=2000, module="model.layers.0.mlp.up_proj.weight"):
    """Summary of gradients f and 0.7 f + Y, the same f for all batches and the same Y for all precisions."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(entries, generator=generator)
    tally = GradientTally({module: entries})
    for _ in range(batches):
        y = make_y(entries, generator)
        y -= (y @ f) / (f @ f) * f  # what follows f belongs to X
        tally.add({module: torch.stack([f, *[0.7 * f + y] * 6])})
    return tally.summary(), f


def test_least_squares_finds_the_x_and_y_that_were_put_in():
    result, f = synthetic(
        lambda entries, generator: 0.3 + torch.randn(entries, generator=generator), batches=4
    )
    for name in NAMES:
        fit = result["fit"][name]
        assert fit["x"] == pytest.approx(0.7, abs=1e-6)
        assert fit["y_share"] == pytest.approx(
            math.sqrt(1 + 0.3**2) / float(f.norm() / len(f) ** 0.5), abs=0.03
        )


def test_independent_noise_fades_as_one_over_the_root_of_n():
    result, _ = synthetic(lambda entries, generator: torch.randn(entries, generator=generator), batches=64)
    noise = result["noise"]["E5M3"]
    assert noise["n"] == [1, 2, 4, 8, 16, 32, 64]
    assert noise["ratio"] == pytest.approx([noise["ratio"][0] / n**0.5 for n in noise["n"]], rel=0.1)
    assert noise["exponent"] == pytest.approx(-0.5, abs=0.02)
    assert result["fit"]["E5M3"]["y_bias"] == pytest.approx(1 / 8, rel=0.1)


def test_a_perturbation_that_is_always_the_same_does_not_fade():
    always = torch.randn(2000, generator=torch.Generator().manual_seed(5))
    result, _ = synthetic(lambda entries, generator: always.clone(), batches=5)
    noise = result["noise"]["E5M3"]
    assert noise["n"] == [1, 2, 4, 5]
    assert noise["ratio"] == pytest.approx([noise["ratio"][0]] * 4, rel=1e-5)
    assert noise["exponent"] == pytest.approx(0, abs=1e-5)
    assert result["fit"]["E5M3"]["y_bias"] == pytest.approx(1, rel=1e-5)


def test_a_module_without_gradient_has_no_cosine_and_harms_nobody():
    rows = torch.ones(7, 5)
    tally = GradientTally({"a.weight": 5, "b.weight": 5})
    tally.add({"a.weight": rows, "b.weight": 0 * rows})
    result = tally.summary()
    assert result["overall"] == [[1.0] * 6] * 6
    assert result["modules"][1]["matrix"] == [[None] * 6] * 6
    assert result["modules"][1]["to_fp"] == [None] * 6
    assert result["fit"]["E5M8"]["y_bias"] is None  # Y is zero
    assert result["noise"]["E5M8"]["exponent"] is None


def test_the_model_is_left_as_it_was(checkpoint_dir):
    model, packed = opened(checkpoint_dir)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    model.lm_head.weight.requires_grad_(False)
    analyze_gradients(model, packed, batches_of(1))
    # a loss of nan
    broken = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), -100)}
    with pytest.raises(OtaroError, match="the loss of batch 2 at full precision is nan"):
        analyze_gradients(model, packed, [*batches_of(1), broken])
    assert model.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_compared_is_refused(checkpoint_dir):
    model, packed = opened(checkpoint_dir)
    with pytest.raises(
        OtaroError,
        match=r"no packed module matches 'q_proj'; names look like "
        r"'model.embed_tokens'",
    ):
        analyze_gradients(model, packed, batches_of(1), modules="q_proj")
    tally = GradientTally({"a.weight": 3})
    with pytest.raises(OtaroError, match="the gradient of batch 1 is zero"):
        tally.add({"a.weight": torch.zeros(7, 3)})
    with pytest.raises(OtaroError, match=r"a\.weight: the gradient of batch 1 is not finite"):
        tally.add({"a.weight": torch.full((7, 3), math.inf)})


@pytest.mark.parametrize(
    ("name", "layer", "projection"),
    [
        ("model.layers.12.self_attn.q_proj.weight", 12, "self_attn.q_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj", 0, "mlp.experts.gate_up_proj"),
        ("model.embed_tokens.weight", None, "embed_tokens"),
        ("lm_head.weight", None, "lm_head"),
    ],
)
def test_places_are_read_from_names(name, layer, projection):
    assert place(name) == {"module": name.removesuffix(".weight"), "layer": layer, "projection": projection}
