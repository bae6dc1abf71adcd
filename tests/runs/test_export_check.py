"""runs/export_check.py: the rounding that llama.cpp does, and that it is what sets its files apart from ours."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch

import otaro
from otaro.builtin import MODEL_DIR, heldout_text
from runs import export_check


def test_inputs_are_rounded_as_gguf_rounds_to_q8_0():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed, whose rounding this is compared with")
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    x[0], x[1, 40] = 0.0, 1000.0
    kind = gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(export_check.to_q8_0(x).numpy(), gguf.dequantize(gguf.quantize(x.numpy(), kind), kind))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_in_one_layer_torch_has_the_logits_of_llama_cpp_where_it_rounds_as_that_does(tmp_path, monkeypatch, capsys):
    otaro.pack(MODEL_DIR, tmp_path / "nested")
    (tmp_path / "text").write_text(heldout_text())
    sizes = ["--layers", "1", "--tokens", "128", "--window", "64"]
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "nested"), "--text", str(tmp_path / "text"), *sizes])
    export_check.main()
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    rounded, of_llama = found["torch, inputs as Q8_0"], found["llama.cpp, Q4_0"]
    assert rounded["divergence"][1] < of_llama["divergence"][0] / 10
    assert found["llama.cpp, F32"]["divergence"][0] < of_llama["divergence"][0] / 10
