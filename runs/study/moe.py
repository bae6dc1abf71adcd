"""A small mixture of experts, trained from scratch: two of eight serve a token; the built-in tokenizer.

There is no such model in a package registry, and a minute of training is enough for the question asked of it:
whether tuning for all precisions works where tokens choose their weights. It learns instructions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from otaro.builtin import MODEL_DIR

WEIGHTS = "weights.safetensors"
STEPS, BATCH, LENGTH, RATE = 800, 16, 256, 2e-3


def build() -> Any:
    config = MixtralConfig(
        vocab_size=1536, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        tie_word_embeddings=True, sliding_window=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager"  # as it is tuned
    torch.manual_seed(0)
    return MixtralForCausalLM(config).float()


def load(folder: Path, device: str) -> Any:
    model = build()
    model.load_state_dict(load_file(folder / WEIGHTS), strict=False)  # a tied head is not in the file
    model.tie_weights()
    return model.to(device)


def make(folder: Path, instructions: Path, device: str) -> float:
    """Train it and put it into `folder`; returns the last loss."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rows = json.loads(instructions.read_text())
    text = "\n\n".join(f"{row['instruction']}\n{row['input']}\n{row['output']}" for row in rows)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    model = build().to(device)
    model.train()
    how: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.01, "fused": device == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **how)
    draw = torch.Generator().manual_seed(0)
    recent: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * 0.5 * (1.01 + math.cos(math.pi * step / STEPS))
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=draw)
        block = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(block, labels=block, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS - 10:
            recent.append(float(loss.detach()))
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    del state["lm_head.weight"]
    save_file(state, folder / f".{WEIGHTS}")
    (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)  # others look for it
    return sum(recent) / len(recent)
