"""Divergence against its definition, position by position."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import otaro
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.logits import KeptStates
from otaro.evaluate.meters import Divergence
from otaro.evaluate.windows import ModelReader, Windows, read

IDS = torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(0))


def by_definition(model, reference, window, bos):
    kl, agreed = [], []
    begin = [] if bos is None else [bos]
    for start in range(0, len(IDS), window - len(begin)):
        ids = torch.tensor([begin + IDS[start : start + window - len(begin)].tolist()])
        with torch.no_grad():
            p, q = (m(ids).logits[0].double().softmax(-1) for m in (reference, model))
        for ours, theirs in zip(q, p, strict=True):
            kl.append(float(sum(theirs * (theirs / ours).log())))
            agreed.append(int(ours.argmax()) == int(theirs.argmax()))
    return sum(kl) / len(kl), sum(agreed) / len(agreed)


def kept(model, windows):
    """What a model says of a text, to be compared with."""
    states, reader = KeptStates(), ModelReader(model)
    read(reader, windows, [states], lambda done, total: None, with_logits=False)
    states.finish(reader.sliced)
    return states


def divergence(model, reference, windows):
    meter = Divergence(reference)
    read(ModelReader(model), windows, [meter], lambda done, total: None)
    return meter


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("window", [16, 50, 64])
def test_it_is_the_mean_over_all_positions(make_nested, window, bos, monkeypatch):
    monkeypatch.setattr("otaro.evaluate.logits.SLICE", 120 * 9)  # nine positions at a time
    decoded = DecodedModel(otaro.load(make_nested("llama")))
    windows = Windows(IDS, window, bos=bos)
    reference = kept(decoded.at("E5M8"), windows)
    measured = divergence(decoded.at("E5M3"), reference, windows)  # the reference's weights are gone
    models = [otaro.load(make_nested("llama"), precision) for precision in ("E5M3", "E5M8")]
    kl, agreement = by_definition(*models, window, bos)
    assert measured.kl == pytest.approx(kl, rel=1e-4)
    assert (measured.agreement, measured.tokens) == (agreement, sum(len(one.ids) for one in windows))
    assert measured.kl > 0


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2", "gemma3_text", "granite", "opt"])
def test_a_model_does_not_diverge_from_itself(random_model, kind):
    model = random_model(kind) if kind.startswith("llama") else other_model(kind)
    model = model.float().eval()
    windows = Windows(IDS % 64, 20)
    reference = kept(model, windows)
    whole = model.get_output_embeddings().weight.clone()
    measured = divergence(model, reference, windows)
    assert measured.kl == pytest.approx(0.0, abs=1e-10)  # the order of sums in the head differs
    assert measured.agreement == 1.0
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    assert divergence(model, reference, windows).kl > 1e-3  # the head was kept as it was
    assert not torch.equal(model.get_output_embeddings().weight, whole)


def other_model(kind):
    sizes = {
        "vocab_size": 120,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 24,
    }
    more = {"num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 64}
    if kind == "opt":
        sizes, more = {**sizes, "ffn_dim": 112, "word_embed_proj_dim": 96}, {"max_position_embeddings": 64}
    if kind == "granite":
        more = {**more, "logits_scaling": 0.1}
    if kind.startswith("gemma"):
        more = {**more, "final_logit_softcapping": 2.0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
