"""Perplexity against a plain reading of its definition."""

import math

import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.meters import Loss
from otaro.evaluate.windows import Windows, read
from tests.evaluate.reading import perplexity

IDS = torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(0))


class Uniform:
    """Predicts every token with the same probability; says what it was asked."""

    def __init__(self, tokens: int, at_once: int = 3) -> None:
        self.tokens, self.at_once = tokens, at_once
        self.windows = []

    def read(self, ids, with_logits):
        self.windows.append(ids.tolist())
        for part in ids.split(self.at_once):
            yield None, torch.zeros(len(part), self.tokens)


def measured(reader, ids, window, stride=None, bos=None, progress=lambda done, total: None):
    loss = Loss(bos is not None)
    read(reader, Windows(ids, window, stride, bos), [loss], progress)
    return loss.perplexity


def by_definition(model, ids, window, stride, bos=None):
    """Every counted token scored on its own, from the logits."""
    losses, weights, scored_to = [], [], 0
    begin = [] if bos is None else [bos]
    room = window - len(begin)
    for start in range(0, len(ids), min(stride, room)):
        end = min(start + room, len(ids))
        with torch.no_grad():
            log_probabilities = (
                model(torch.tensor([begin + ids[start:end].tolist()])).logits[0].log_softmax(-1)
            )
        counted = [t for t in range(scored_to, end) if t > start or begin]
        if counted:
            window_losses = [-float(log_probabilities[len(begin) + t - 1 - start, ids[t]]) for t in counted]
            losses.append(sum(window_losses) / len(window_losses))
            weights.append((end - scored_to) - (not begin))
        scored_to = end
        if end == len(ids):
            break
    return math.exp(sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights))


def test_a_uniform_model_has_the_size_of_its_vocabulary():
    assert measured(Uniform(50), torch.zeros(1000, dtype=torch.long), window=64) == pytest.approx(50)


def test_windows_are_cut_and_counted_as_documented():
    model, ids = Uniform(2), torch.arange(10) % 2
    measured(model, ids, window=4, stride=3)
    assert model.windows == [ids[0:4].tolist(), ids[3:7].tolist(), ids[6:10].tolist()]
    assert [window.known for window in Windows(ids, 4, 3)] == [0, 1, 1]


def test_every_window_begins_with_the_beginning_of_text_which_takes_a_position_and_is_not_scored():
    ids, model = torch.arange(10), Uniform(20)
    assert measured(model, ids, window=4, bos=15) == pytest.approx(20)
    assert model.windows == [[15, 0, 1, 2], [15, 3, 4, 5], [15, 6, 7, 8], [15, 9]]
    assert [window.known for window in Windows(ids, 4, bos=15)] == [1, 1, 1, 1]
    overlapping = list(Windows(ids, 4, 2, bos=15))
    assert [window.ids.tolist()[0] for window in overlapping] == [15] * len(overlapping)
    assert sum(len(window.ids) - window.known for window in overlapping) == 10  # none twice
    assert list(map(len, (w.ids for w in Windows(ids, 4, 4, bos=15)))) == [4, 4, 4, 2]  # as without a stride


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 8), (16, 5), (64, 64)])
def test_it_is_the_strided_computation(make_nested, window, stride, bos, monkeypatch):
    # slices of 9 positions, which no window is a multiple of
    monkeypatch.setattr("otaro.evaluate.logits.SLICE", 120 * 9)
    model = DecodedModel(otaro.load(make_nested("llama"))).at("E5M5")
    value = perplexity(model, IDS, window=window, stride=stride, bos=bos)
    assert value == pytest.approx(by_definition(model, IDS, window, stride, bos), rel=1e-5)


def test_a_loss_beyond_all_bounds_is_infinite():
    class Certain(Uniform):
        def read(self, ids, with_logits):
            yield None, torch.tensor([[1e4, 0.0]]).expand(len(ids), 2)

    assert measured(Certain(2), torch.ones(10, dtype=torch.long), window=4) == math.inf


def test_progress_reaches_the_end():
    seen = []
    measured(
        Uniform(2),
        torch.zeros(10, dtype=torch.long),
        4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize(
    ("tokens", "stride", "words"), [(1, None, "at least 2 tokens"), (9, 5, "stride"), (9, -1, "stride")]
)
def test_what_cannot_be_measured_is_refused(tokens, stride, words):
    with pytest.raises(OtaroError, match=words):
        measured(Uniform(2), torch.zeros(tokens, dtype=torch.long), window=4, stride=stride)
