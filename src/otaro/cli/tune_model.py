"""The model that a run tunes: all of its weights in float32, or adapters over frozen ones in the type they
are stored in.

And the checkpoint that it ends with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otaro.errors import OtaroError, install
from otaro.tune import processes

if TYPE_CHECKING:
    import torch

    from otaro.tune.config import Options, Training

# as Trainer calls them
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def load_model(path: Path, training: Training) -> Any:
    """The model, with adapters where the run is to tune these."""
    import torch
    from transformers import AutoModelForCausalLM

    from otaro.file.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)  # refuses what cannot be packed afterwards, before hours of tuning
    _check_optimizer(training)
    if not training.lora:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise OtaroError(f"--lora needs the package peft; install it with: {install('lora')}") from None
    from otaro.packable import Kind, packable
    from otaro.tune.fake_quant import narrow_frozen

    model, own = _frozen(path, checkpoint)
    linears = [one.path for one in packable(model) if one.kind is Kind.LINEAR]
    if not linears:
        raise OtaroError(
            f"--lora adapts plain linear layers, and {type(model).__name__} has none; tune it without"
        )
    rank = training.lora
    torch.manual_seed(training.seed)  # of the adapters
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears, lora_dropout=0.0)
    model = get_peft_model(model, config)
    narrow_frozen(model, own)
    return model


def _frozen(path: Path, checkpoint: Any) -> tuple[Any, torch.dtype]:
    """A model to freeze, and the type that all of its matrices are stored in.

    Loaded in that type where nothing is rounded thereby: no tensor that is stored in a wider one, and no
    buffer that the model computes for itself, as Gemma does the scale of its embedding. Else in float32,
    which takes twice the memory of the host.
    """
    import torch
    from transformers import AutoModelForCausalLM

    stored = {checkpoint.stored_dtype(name) for name in checkpoint.packed}
    own = stored.pop() if len(stored) == 1 else torch.float32
    if {checkpoint.stored_dtype(name) for name in checkpoint.shapes} == {own}:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=own)
        if all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point()):
            return model, own
        del model
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), own


def _check_optimizer(training: Training) -> None:
    if training.optimizer == "adamw8bit":
        from importlib.util import find_spec

        if find_spec("bitsandbytes") is None:
            raise OtaroError(
                "--optimizer adamw8bit needs the package bitsandbytes; install it with: "
                f"{install('adam8bit')}"
            )


def gathered(model: Any) -> dict[str, Any]:
    """All weights of a sharded model in whole, in the first process; by all processes together."""
    whole = {}
    for name, part in model.state_dict().items():
        tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
        if processes.is_first():
            whole[name] = tensor.cpu()
    return whole


def save(model: Any, tokenizer: Any, options: Options, target: Path) -> None:
    """The tuned checkpoint: weights as tuned, and a config.json with their type, or opening rounds them."""
    from otaro.file.atomic import new_directory
    from otaro.file.coding import Coding, write_coding
    from otaro.file.replace import carry_over

    with new_directory(target, overwrite=True) as directory:
        write_coding(directory, Coding(options.group_size, options.reconstruction))
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        config = json.loads((directory / "config.json").read_text())
        types = {tensor.dtype for tensor in model.parameters()}
        config["dtype"] = "float32" if len(types) > 1 else str(types.pop()).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        # a record there is about weights that go
        carry_over(target, directory, "", ["model.safetensors*", "model-*-of-*.safetensors"])
