"""`Sampling` leaves the tokens that transformers' processors leave, with their probabilities."""

import pytest
import torch
from transformers.generation import LogitsProcessorList

import otaro

IDS = torch.tensor([[3, 50, 50, 110, 4999]])


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 300, "top_p": 0.5}])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_what_may_be_drawn(min_p, penalty, others, spread):
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    logits[100:120] = logits[50]  # ties
    sampling = otaro.Sampling(0.7, min_p=min_p, repetition_penalty=penalty, seed=0, **others)
    sampler = sampling.sampler()
    assert sampler.known
    tokens, chances = sampler.distribution(IDS, logits)
    ours = torch.zeros(5000, dtype=torch.float64)
    ours[slice(None) if tokens is None else tokens] = torch.from_numpy(chances)
    theirs = LogitsProcessorList(sampler.processors)(IDS, logits.clone()[None]).softmax(-1)[0].double()
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours / ours.sum(), theirs, rtol=1e-4, atol=0)
    drawn = {
        otaro.Sampling(0.7, min_p=min_p, seed=seed, **others).sampler().choose(IDS, logits[None])[0]
        for seed in (5, 5)
    }
    assert len(drawn) == 1


def test_a_penalty_counts_for_the_likeliest_too():
    logits = torch.zeros(5000)
    logits[50], logits[7] = 2.0, 1.5
    assert otaro.Sampling().sampler().choose(IDS, logits[None]) == [50]
    assert otaro.Sampling(repetition_penalty=1.5).sampler().choose(IDS, logits[None]) == [7]
    assert not otaro.Sampling(repetition_penalty=1.5).sampler().argmax


@pytest.mark.parametrize("penalty", [1.1, 0.7, 1.3])
def test_a_penalty_leaves_the_bits_that_transformers_leaves(penalty):
    """And the logits as they were. Tokens that the head does not have are passed over."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    before, ids = logits.clone(), torch.randint(5100, (2, 400), generator=torch.Generator().manual_seed(3))
    sampler = otaro.Sampling(repetition_penalty=penalty).sampler()
    assert torch.equal(
        sampler._penalized(ids, logits), LogitsProcessorList(sampler.processors)(ids, logits.clone())
    )
    assert torch.equal(logits, before)
