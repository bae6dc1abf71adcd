"""Perplexity against a plain reading of its definition."""

import math

import pytest
import torch

from otaro.errors import OtaroError
from otaro.evaluate.perplexity import perplexity


class Uniform(torch.nn.Module):
    """Predicts every token with the same probability; says what it was asked."""

    device = torch.device("cpu")

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.windows = []

    def forward(self, ids, labels, use_cache):
        self.windows.append((ids.shape[1], int((labels != -100).sum())))
        return type("Output", (), {"loss": torch.tensor(math.log(self.tokens))})


def by_definition(model, ids, window, stride):
    """Every counted token scored on its own, from the logits."""
    losses, weights, scored_to = [], [], 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        with torch.no_grad():
            log_probabilities = model(ids[start:end].unsqueeze(0)).logits[0].log_softmax(-1)
        counted = [t for t in range(scored_to, end) if t > start]
        if counted:
            window_losses = [-float(log_probabilities[t - 1 - start, ids[t]]) for t in counted]
            losses.append(sum(window_losses) / len(window_losses))
            weights.append((end - scored_to) - 1)
        scored_to = end
        if end == len(ids):
            break
    return math.exp(sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights))


def test_a_uniform_model_has_the_size_of_its_vocabulary():
    assert perplexity(Uniform(50), torch.zeros(1000, dtype=torch.long), window=64) == pytest.approx(50)


def test_windows_are_cut_and_counted_as_documented():
    model = Uniform(2)
    perplexity(model, torch.zeros(10, dtype=torch.long), window=4, stride=3)
    assert model.windows == [(4, 4), (4, 3), (4, 3)]


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 8), (16, 5), (64, 64)])
def test_it_is_the_strided_computation(make_nested, window, stride):
    import otaro

    model = otaro.load(make_nested("llama"), "E5M5")
    ids = torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(0))
    assert perplexity(model, ids, window=window, stride=stride) == pytest.approx(
        by_definition(model, ids, window, stride), rel=1e-5
    )


def test_a_loss_beyond_all_bounds_is_infinite():
    model = Uniform(2)
    model.tokens = 10**400
    assert perplexity(model, torch.zeros(10, dtype=torch.long), window=4) == math.inf


def test_progress_reaches_the_end():
    seen = []
    perplexity(Uniform(2), torch.zeros(10, dtype=torch.long), window=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize(("tokens", "stride", "words"), [(1, None, "at least 2 tokens"), (9, 5, "stride"), (9, -1, "stride")])
def test_what_cannot_be_measured_is_refused(tokens, stride, words):
    with pytest.raises(OtaroError, match=words):
        perplexity(Uniform(2), torch.zeros(tokens, dtype=torch.long), window=4, stride=stride)
