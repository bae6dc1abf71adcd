"""The oracle of the runtime: an ordinary model whose weights went through the codec."""

import copy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro.file.io import NestedDirectory


@pytest.fixture(scope="session")
def decoded_model(make_checkpoint, make_nested, as_packed):
    """decoded_model("qwen2", "E5M4") is the ordinary model, in float32, with `encode(w).decode("E5M4")` for
    each packed w.

    A function of the parameter's name may give the precision. A tied head becomes a parameter of its own,
    `lm_head.weight`.
    """

    @cache
    def ordinary(architecture, dtype):
        return AutoModelForCausalLM.from_pretrained(
            make_checkpoint(architecture), dtype=dtype, experts_implementation="eager"
        )

    def make(architecture, precision, reconstruction="midpoint", dtype=torch.float32):
        model, stored = (
            copy.deepcopy(ordinary(architecture, dtype)),
            ordinary(architecture, "auto").state_dict(),
        )
        packed = NestedDirectory(make_nested(architecture, reconstruction)).schema.packed
        for name in {*packed, "lm_head.weight"}:
            chosen = precision(name) if callable(precision) else precision
            values = otaro.encode(as_packed(name, stored[name]), reconstruction=reconstruction).decode(chosen)
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, torch.nn.Parameter(as_packed(name, values).to(dtype)))
        return model

    return make


@pytest.fixture(scope="session")
def logits():
    """logits(model) on a few rows of tokens that between them are the whole vocabulary."""
    ids = torch.arange(120).reshape(4, 30)

    def run(model):
        with torch.no_grad():
            return model(ids).logits

    return run


@pytest.fixture(scope="session")
def assert_same_logits(logits):
    """assert_same_logits(a, b): that two float32 models compute the same, up to the rounding of a library's
    products.

    Each of a model's products rounds n numbers in an order of its own, which moves it by n epsilon at most,
    relative to the largest, and so do all together by as many times that; norms keep it from growing. A plane
    more or less moves logits by more (`test_a_plane_moves_logits_by_more_than_rounding_does`).
    """

    def check(model, expected):
        got, wanted = logits(model), logits(expected)
        torch.testing.assert_close(got, wanted, rtol=0, atol=rounding(expected) * float(wanted.abs().max()))

    def rounding(model):
        matrices = [parameter for name, parameter in model.named_parameters() if parameter.dim() > 1]
        return len(matrices) * max(matrix.shape[-1] for matrix in matrices) * torch.finfo(torch.float32).eps

    check.rounding = rounding
    return check


@pytest.fixture(scope="session")
def make_variant(random_model, tmp_path_factory):
    """make_variant("llama", {"attention_bias": True}) packs such a model and returns its directory and a
    function.

    The function gives, for a precision, the ordinary model in float64 on weights decoded at it.
    """

    def make(architecture, changes):
        directory = tmp_path_factory.mktemp("variant")
        random_model(architecture, **changes).save_pretrained(directory / "checkpoint")
        otaro.pack(directory / "checkpoint", directory / "nested")

        def truth(precision):
            model = AutoModelForCausalLM.from_pretrained(directory / "checkpoint", dtype=torch.float64)
            stored = AutoModelForCausalLM.from_pretrained(directory / "checkpoint").state_dict()
            for name in NestedDirectory(directory / "nested").schema.packed:
                model.get_parameter(name).data = otaro.encode(stored[name]).decode(precision).double()
            return model

        return directory / "nested", truth

    return make
