"""The oracle of the runtime: an ordinary model whose weights went through the codec."""

import copy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro.file.io import NestedDirectory


@pytest.fixture(scope="session")
def decoded_model(make_checkpoint, make_nested):
    """decoded_model("qwen2", "E5M4") is the ordinary model, in float32, with `encode(w).decode("E5M4")` for each packed w.

    A function of the parameter's name may give the precision. A tied head becomes a parameter of its own, `lm_head.weight`.
    """

    @cache
    def ordinary(architecture, dtype):
        return AutoModelForCausalLM.from_pretrained(make_checkpoint(architecture), dtype=dtype, experts_implementation="eager")

    def make(architecture, precision, reconstruction="midpoint", dtype=torch.float32):
        model, stored = copy.deepcopy(ordinary(architecture, dtype)), ordinary(architecture, "auto").state_dict()
        packed = NestedDirectory(make_nested(architecture, reconstruction)).schema.packed
        for name in {*packed, "lm_head.weight"}:
            chosen = precision(name) if callable(precision) else precision
            values = otaro.encode(stored[name], reconstruction=reconstruction).decode(chosen)
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, torch.nn.Parameter(values.to(dtype)))
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
def make_variant(random_model, tmp_path_factory):
    """make_variant("llama", {"attention_bias": True}) packs such a model and returns its directory and a function.

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
