"""The counts of `otaro analyze weights` against a plain loop over groups and weights."""

import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import otaro
from otaro.errors import WeightError
from otaro.evaluate.weights import analyze_weights, counted, shares
from otaro.file.checkpoint import Checkpoint
from tests.sefp import oracle
from tests.sefp.exact import fractions

NAMES = [str(p) for p in otaro.PRECISIONS]


def by_hand(pieces, group_size, reconstruction):
    """The definitions at the head of the module, one weight at a time; scales and codes are the oracle's."""
    total, lost, squares, errors = Counter(), Counter(), 0.0, Counter()
    for piece in pieces:
        groups = [fractions(group) for row in piece for group in row.split(group_size)]
        _, scales, codes = oracle.encoded(groups, reconstruction)
        for group, s, finest in zip(groups, scales, codes, strict=True):
            sizes = [abs(w) for w in group]
            ranked = sorted(sizes, reverse=True)
            dominated = len(group) > 1 and ranked[0] > 0 and ranked[0] >= 4 * ranked[1]
            total["groups"] += 1
            total["dominated"] += dominated
            for w, code in zip(group, finest, strict=True):
                total["nonzero"] += w != 0
                squares += float(w) ** 2
                for m, name in zip(range(8, 2, -1), NAMES, strict=True):
                    value = oracle.value(oracle.shifted(code, m), s, m, reconstruction)
                    lost[name] += bool(w) and abs(value - w) >= abs(w)
                    errors[name] += float(value - w) ** 2
    return {
        "outlier_groups": total["dominated"] / total["groups"],
        "lost": {name: lost[name] / total["nonzero"] for name in NAMES},
        "error": {name: math.sqrt(errors[name] / squares) for name in NAMES},
    }


def assert_same(found, expected):
    for key in ("outlier_groups", "lost"):
        assert found[key] == expected[key], key
    assert found["error"] == pytest.approx(expected["error"], rel=1e-6)


def awkward(rows, length):
    """Weights with outliers, zeros, ties, weights at the edges of steps, and a range of scales beyond what a
    byte holds.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(rows, length, generator=generator) * 2.0 ** torch.randint(
        -20, 3, (rows, 1), generator=generator
    )
    weights[:, ::7] *= 16  # outliers
    weights[torch.rand(rows, length, generator=generator) < 0.1] = 0
    weights[0] = 0
    weights[1] = torch.tensor([1.0, -0.25, 0.125, 0.0625, -0.0625, 0.03125, 2**-9, -(2**-30)]).repeat(length)[
        :length
    ]
    weights[2, 1:] = 0
    return weights


@pytest.mark.parametrize("group_size", [5, 16, 64])
@pytest.mark.parametrize("length", [33, 40])
def test_counts_are_those_of_a_plain_loop(group_size, length, reconstruction):
    # 33 ends in a group of one weight at group size 16, and in short groups at the others
    weights = awkward(24, length)
    found = sum(counted(some, group_size, reconstruction) for some in (weights[:10], weights[10:]))
    expected = by_hand([weights[:10], weights[10:]], group_size, reconstruction)
    assert_same(shares(found), expected)
    assert sum(expected["lost"].values()) > 0
    assert 0 < expected["outlier_groups"] < 1


def test_the_group_worked_by_hand():
    weights = torch.tensor([[0.5, 0.04, -0.007, 0.0]])
    shown = {kind: shares(counted(weights, 64, kind)) for kind in ("truncate", "midpoint")}
    assert shown["truncate"]["outlier_groups"] == 1
    assert shown["truncate"]["lost"]["E5M4"] == pytest.approx(2 / 3)
    assert shown["midpoint"]["lost"]["E5M4"] == pytest.approx(1 / 3)


def test_a_checkpoint_is_counted_tensor_by_tensor(make_checkpoint):
    directory = make_checkpoint("qwen3_moe")
    checkpoint = Checkpoint(directory)
    seen = []
    result = analyze_weights(
        checkpoint, group_sizes=(16, 64), progress=lambda name, done, total: seen.append((name, done, total))
    )
    assert [module["module"] for module in result["modules"]] == [
        name.removesuffix(".weight") for name in checkpoint.packed
    ]
    assert result["weights"] == sum(tensor.numel() for tensor in map(checkpoint.read, checkpoint.packed))
    assert {name for name, _, _ in seen} == set(checkpoint.packed)
    tensors = {name: checkpoint.read(name).flatten(0, -2).float() for name in checkpoint.packed}
    name = "model.layers.1.mlp.experts.down_proj"
    module = next(module for module in result["modules"] if module["module"] == name)
    assert_same(module["by_group_size"]["16"], by_hand([tensors[name]], 16, "midpoint"))
    # Overall is not the mean of the modules' shares but the share in all their weights.
    lost = sum(
        m["by_group_size"]["64"]["lost"]["E5M3"] * torch.count_nonzero(tensors[key])
        for m, key in zip(result["modules"], tensors, strict=True)
    )
    assert result["overall"]["64"]["lost"]["E5M3"] == pytest.approx(
        float(lost / sum(map(torch.count_nonzero, tensors.values())))
    )


def test_rows_read_in_parts_give_the_same_counts(checkpoint_dir, monkeypatch):
    whole = analyze_weights(Checkpoint(checkpoint_dir), group_sizes=(64,))
    monkeypatch.setattr("otaro.evaluate.weights._CHUNK", 1000)
    parts = analyze_weights(Checkpoint(checkpoint_dir), group_sizes=(64,))
    assert_same(parts["overall"]["64"], whole["overall"]["64"])


def test_a_weight_that_cannot_be_encoded_is_named(checkpoint_dir, copy_of, monkeypatch):
    directory = copy_of(checkpoint_dir)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][70, 3] = math.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("otaro.evaluate.weights._CHUNK", 1000)
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight\[70, 3\] is nan"):
        analyze_weights(Checkpoint(directory))
