"""Calibration on a GPU: a block of columns as one graph chooses what it chooses launch by launch."""

import pytest
import torch

from otaro.calibrate import codes
from otaro.sefp.codec import encode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("columns", [64, 192, 208])
def test_graphs_choose_the_same_codes(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(columns)
    weight, inputs = torch.randn(96, columns) * 0.02, torch.randn(500, columns, device="cuda")
    errors = codes.Errors(inputs.T @ inputs)
    arguments = weight.cuda(), encode(weight).scales.cuda(), 64, errors
    captured = codes.compensated(*arguments)
    monkeypatch.setattr(codes._Block, "captured", lambda block, *shape: block)
    assert torch.equal(captured, codes.compensated(*arguments))
