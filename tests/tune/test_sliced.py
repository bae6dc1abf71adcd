"""The loss in slices of tokens: the same loss and gradients as from whole logits, which are never there."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune import sliced
from otaro.tune.config import Options
from otaro.tune.fake_quant import Precisely, narrow_frozen, prepare
from otaro.tune.sliced import Distillation, SlicedHead
from otaro.tune.trainer import OtaroTrainer, losses_by_precision
from tests.conftest import SIZES

M4 = Precision("E5M4")
IDS = torch.randint(3, 120, (3, 11), generator=torch.Generator().manual_seed(0))
LABELS = IDS.where(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -100)


@pytest.fixture(autouse=True)
def slices_of_five(monkeypatch):
    monkeypatch.setattr(sliced, "SLICE_BYTES", 5 * 4 * SIZES["vocab_size"])


@pytest.fixture
def prepared(random_model):
    def make(architecture="llama", **changes):
        prepare(model := random_model(architecture, **changes).float().train(), precisely := Precisely())
        return model, precisely

    return make


def whole_loss(model, items=None, share=0.0, teacher=None):
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    labels = LABELS[:, 1:].flatten()
    counted = labels != -100
    plain = torch.nn.functional.cross_entropy(logits[counted], labels[counted], reduction="sum")
    count = items or counted.sum()
    if not share:
        return plain / count
    taught = teacher[:, :-1].flatten(0, 1)[counted].log_softmax(-1)
    divergence = (taught.exp() * (taught - logits[counted].log_softmax(-1))).sum()
    return ((1 - share) * plain + share * divergence) / count


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("hold", [True, False], ids=["held", "made again"])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("items", [None, 40], ids=["mean", "sum over items"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "mixtral"])
def test_loss_and_gradients_are_those_of_whole_logits(prepared, architecture, items, share, hold):
    model, precisely = prepared(architecture)
    precisely.hold = hold
    exact = copy.deepcopy(model).double()
    head = SlicedHead.find(model, {"input_ids": IDS})
    with torch.no_grad():
        teacher, exact_teacher = model(input_ids=IDS).logits, exact(input_ids=IDS).logits
        with head.hidden_states():
            hidden = model(input_ids=IDS).logits
    assert hidden.shape == (*IDS.shape, SIZES["hidden_size"])
    with precisely.at(M4), exact.lm_head.precisely.at(M4):
        whole = whole_loss(model, items, share, teacher)
        right = whole_loss(exact, items, share, exact_teacher)
        with head.losses(Distillation(share, hidden) if share else None):
            found = model(input_ids=IDS, labels=LABELS, num_items_in_batch=items).loss
        # a rounding for each token
        torch.testing.assert_close(found, whole, rtol=IDS.numel() * 2.0**-24, atol=0)
        of_whole, of_right, of_found = (
            gradients(model, whole),
            gradients(exact, right),
            gradients(model, found),
        )
    assert errors(of_found, of_right) <= 2 * errors(of_whole, of_right)


def errors(found, right):
    """The distance of all gradients from what they are in float64."""
    return torch.stack(
        [torch.dist(found[name].double(), gradient) for name, gradient in right.items()]
    ).norm()


def test_no_tensor_of_more_than_a_slice_of_logits_is_ever_made(prepared):
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
                # the head's weight, transposed
                if shape[-1:] == (SIZES["vocab_size"],) and shape[0] != SIZES["hidden_size"]:
                    self.rows = max(self.rows, tensor.numel() // SIZES["vocab_size"])
            return made

    model, precisely = prepared()
    head = SlicedHead.find(model, {"input_ids": IDS})
    with precisely.at(M4), Largest() as whole:
        model(input_ids=IDS, labels=LABELS).loss.backward()
    with torch.no_grad(), head.hidden_states():
        hidden = model(input_ids=IDS).logits
    with precisely.at(M4), Largest() as slices, head.losses(Distillation(0.5, hidden)):
        model(input_ids=IDS, labels=LABELS).loss.backward()
    assert (whole.rows, slices.rows) == (IDS.numel(), 5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625, "pad_token_id": 0, "eos_token_id": 2}),
    ],
)
def test_a_head_that_does_more_than_a_product_keeps_its_whole_logits(kind, changes):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, **changes}), dtype=torch.float32
    )
    prepare(model, Precisely())
    assert SlicedHead.find(model, {"input_ids": IDS}) is None
    assert "forward" not in model.get_output_embeddings().__dict__


def test_small_logits_and_models_that_are_not_prepared_are_left_whole(prepared, random_model, monkeypatch):
    model, _ = prepared()
    assert SlicedHead.find(random_model("llama"), {"input_ids": IDS}) is None
    assert SlicedHead.find(model, {"input_ids": IDS[:1, :5]}) is None
    assert SlicedHead.find(model, {"input_ids": IDS}) is not None
    model.loss_function = lambda *_, **__: torch.zeros(())  # a loss of the user's own
    sliced._PLAIN.clear()
    assert SlicedHead.find(model, {"input_ids": IDS}) is None


def test_what_a_pass_changes_of_the_model_is_changed_back_also_by_an_error(prepared):
    model, _ = prepared()
    head = SlicedHead.find(model, {"input_ids": IDS})
    before = model.loss_function
    with pytest.raises(ZeroDivisionError), head.losses():
        _ = 1 / 0
    assert model.loss_function is before
    assert model(input_ids=IDS).logits.shape == (*IDS.shape, SIZES["vocab_size"])
    assert model.training


def trained(model, directory, kind=OtaroTrainer, **changes):
    tokens = torch.randint(3, 120, (32, 10), generator=torch.Generator().manual_seed(1))
    data = [
        {"input_ids": ids, "labels": ids.where(torch.arange(10) >= n % 4, -100)}
        for n, ids in enumerate(tokens)
    ]
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 2.0**-7,
        **changes,
    }
    report = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "use_cpu": True,
    }
    arguments = TrainingArguments(directory, train_sampling_strategy="sequential", **settings, **report)
    options = Options(method="uniform", distill=0.5, distill_at=PRECISIONS)
    trainer = kind(model, arguments, train_dataset=data, otaro=options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}], ids=str
)
def test_a_trainer_ends_with_the_weights_that_whole_logits_lead_to(
    random_model, tmp_path, monkeypatch, changes
):
    model = random_model("llama_tied").float()
    found = trained(copy.deepcopy(model), tmp_path, **changes)
    in_slices = found.model.get_output_embeddings() in sliced._PLAIN
    assert in_slices == ("label_smoothing_factor" not in changes)
    monkeypatch.setattr(sliced, "SLICE_BYTES", 1 << 30)
    expected = trained(model, tmp_path, **changes)
    for (name, one), other in zip(found.model.named_parameters(), expected.model.parameters(), strict=True):
        # of one step: later ones round to grids
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)


def test_in_bf16_slices_are_no_further_from_float32_than_whole_logits_are(
    random_model, tmp_path, monkeypatch
):
    model = random_model("llama_tied").float()
    found = trained(copy.deepcopy(model), tmp_path, bf16=True)
    monkeypatch.setattr(sliced, "SLICE_BYTES", 1 << 30)
    whole = trained(copy.deepcopy(model), tmp_path, bf16=True)
    exact = trained(model, tmp_path)
    weights = [[p.detach() for p in trainer.model.parameters()] for trainer in (found, whole, exact)]
    for one, other, right in zip(*weights, strict=True):
        assert torch.dist(one, right) <= 2 * torch.dist(other, right)


def test_losses_by_precision_are_the_same_in_slices(prepared, monkeypatch):
    model, precisely = prepared("qwen2")
    batches = [{"input_ids": IDS, "labels": LABELS}]
    found = losses_by_precision(model, precisely, [None, *PRECISIONS], batches)
    monkeypatch.setattr(sliced, "SLICE_BYTES", 1 << 30)
    assert found == pytest.approx(
        losses_by_precision(model, precisely, [None, *PRECISIONS], batches), rel=1e-6
    )


def test_a_frozen_head_in_its_own_type_is_sliced_too(random_model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(
        random_model("mistral"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    narrow_frozen(model, torch.bfloat16)
    prepare(model.train(), precisely := Precisely())
    head = SlicedHead.find(model, {"input_ids": IDS})
    with precisely.at(M4):
        expected = gradients(model, whole := whole_loss(model))
        with head.losses():
            found = model(input_ids=IDS, labels=LABELS).loss
        torch.testing.assert_close(found, whole, rtol=IDS.numel() * 2.0**-24, atol=0)
        for name, gradient in gradients(model, found).items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-4, atol=float(expected[name].abs().max()) * 1e-4
            )


def test_compiled_slices_give_the_same_weights(random_model, tmp_path):
    class Compiled(OtaroTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._slice_loss = torch.compile(sliced.slice_loss, backend="aot_eager")

    model = random_model("llama_tied").float()
    found, expected = trained(copy.deepcopy(model), tmp_path, kind=Compiled), trained(model, tmp_path)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
