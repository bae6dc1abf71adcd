"""Divergence against its definition, position by position."""

import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate.divergence import divergence

IDS = torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(0))


def by_definition(model, reference, window):
    kl, agreed = [], []
    for start in range(0, len(IDS), window):
        with torch.no_grad():
            p, q = (m(IDS[None, start : start + window]).logits[0].double().softmax(-1) for m in (reference, model))
        for ours, theirs in zip(q, p, strict=True):
            kl.append(float(sum(theirs * (theirs / ours).log())))
            agreed.append(int(ours.argmax()) == int(theirs.argmax()))
    return sum(kl) / len(kl), sum(agreed) / len(agreed)


@pytest.mark.parametrize("window", [16, 50, 64])
def test_it_is_the_mean_over_all_positions(make_nested, window):
    ours, theirs = otaro.load(make_nested("llama"), "E5M3"), otaro.load(make_nested("llama"), "E5M8")
    measured = divergence(lambda ids: ours(ids).logits, lambda ids: theirs(ids).logits, IDS, window=window)
    kl, agreement = by_definition(ours, theirs, window)
    assert measured.kl == pytest.approx(kl, rel=1e-4)
    assert (measured.agreement, measured.tokens) == (agreement, 50)
    assert measured.kl > 0


def test_a_model_does_not_diverge_from_itself(make_nested):
    model = otaro.load(make_nested("llama"), "E5M5")
    measured = divergence(lambda ids: model(ids).logits, lambda ids: model(ids).logits, IDS, window=20)
    assert (measured.kl, measured.agreement) == (0.0, 1.0)


def test_positions_compared_in_parts_are_all_compared():
    table = torch.randn(300, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(300, dtype=torch.long)
    seen = []
    measured = divergence(
        lambda some: table[None, : some.shape[1]],
        lambda some: torch.zeros(1, some.shape[1], 7),
        ids,
        window=300,
        progress=lambda done, total: seen.append((done, total)),
    )
    wanted = torch.nn.functional.kl_div(table.log_softmax(-1), torch.full((300, 7), 1 / 7), reduction="batchmean")
    assert measured.kl == pytest.approx(float(wanted), rel=1e-5)
    assert seen == [(300, 300)]


def test_nothing_to_compare_is_refused():
    with pytest.raises(OtaroError, match="a token of text"):
        divergence(lambda ids: ids, lambda ids: ids, IDS[:0], window=4)
