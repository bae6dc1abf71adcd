"""Parts of bench_table2.py that decode: LLaMA-3-8B with random weights, token after token, behind a context of 2,000."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gpu
import torch
from llama3 import (
    GIB,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KEY_HEADS,
    LAYERS,
    NORM_BYTES,
    VOCABULARY,
    cache_bytes,
    step_bytes,
    weight_bytes,
)
from table2_products import Settings, say

from otaro.sefp.precision import Precision

CONTEXT = 2000
CAPACITY = 2048
STEPS = CAPACITY - CONTEXT  # of a round; then the context is gone back to
PAPER = {"float16": (15.20, 39.00), "E5M4": (4.77, 95.65)}
"""Table 2: GB of weights and keys and values, tokens a second."""


class Contender(NamedTuple):
    """Something that decodes."""

    step: Callable[[], Any]
    """One token after those before; it may return before the GPU is done."""
    rewind: Callable[[], Any]
    """Forget all tokens after the context."""


def config(layers: int = LAYERS) -> Any:
    """LLaMA-3-8B in the words of transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=HEAD_SIZE, vocab_size=VOCABULARY, max_position_embeddings=8192,
        rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def rounds_of(contenders: Mapping[str, Contender], rounds: int, steps: int | None = None) -> dict[str, list[float]]:
    """Seconds of a token of each contender, in every round; contenders take turns, and the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    steps = steps or STEPS
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            contender.rewind()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                contender.step()
            torch.cuda.synchronize()
            if number:
                times[name].append((time.perf_counter() - started) / steps)
    return times


def through_transformers(asked: Settings) -> dict[str, Any]:
    """Float16 as transformers' users run it fast: static cache, the forward of one token compiled with CUDA graphs."""
    say("\nfloat16 through transformers, compiled (mode reduce-overhead) with a static cache; compiling takes a minute")
    before = allocated()
    contender, held = transformers_contender()
    started = time.perf_counter()
    for _ in range(3):  # compiles, then records the graph
        contender.step()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - started
    times = rounds_of({"transformers": contender}, 3 if asked.quick else 5)["transformers"]
    seconds = statistics.median(times)
    bound = roofline(None, None, asked.copy_rate)
    say(f"compiled in {compiled:.0f} s")
    say(f"{1 / seconds:.1f} tokens/s, {seconds * 1e3:.3f} ms; by the bytes no faster than {1 / bound:.0f} tokens/s")
    return {
        "seconds": seconds, "rounds": times, "tokens_per_s": 1 / seconds, "compile_seconds": compiled,
        "accounted": accounted(None, None), "weights_allocated": held - before, "allocated": allocated() - before,
    }  # fmt: skip


@torch.no_grad()
def transformers_contender() -> tuple[Contender, int]:
    """The compiled model after a prompt; and the bytes allocated when it held its weights alone."""
    from transformers import AutoModelForCausalLM, StaticCache

    with torch.device(gpu.DEVICE):
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.float16).eval()
    held = allocated()
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    prompt = torch.randint(VOCABULARY, (1, CONTEXT), device=gpu.DEVICE)
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def forward(ids: torch.Tensor) -> Any:
        following = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return following[:, -1].argmax(-1, keepdim=True)

    compiled: Any = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    def step() -> None:
        token.copy_(compiled(token))

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)

    return Contender(step, rewind), held


def roofline(precision: Precision | None, cache: Precision | None, copy_rate: float) -> float:
    """Seconds that a token takes at least: what it must read, at the speed of a plain copy."""
    return step_bytes(CONTEXT, precision, cache) / copy_rate


def accounted(precision: Precision | None, cache: Precision | None) -> dict[str, float]:
    """Memory by exact accounting, in GiB."""
    weights, keys = weight_bytes(precision) / GIB, cache_bytes(CONTEXT, cache) / GIB
    return {"weights_gib": weights, "cache_gib": keys, "norms_gib": NORM_BYTES / GIB, "total_gib": weights + keys}


def allocated() -> int:
    """Bytes of tensors on the GPU."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"]) if torch.cuda.is_available() else 0
