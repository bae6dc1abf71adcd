"""What tuning takes of a GPU's memory: LoRA on LLaMA-3-8B's shapes, full tuning of 1B, and a vocabulary of 262,144 words.

Weights are random and made on the device. Each case trains a few steps through the trainer and tells seconds a step, the
peak of what tensors took (`taken`) and of what the allocator had from the GPU (`held`), and what `otaro tune` would have
foretold. A case that fails says why, and the next one goes on.

    python benchmarks/bench_memory.py                                  # a GPU with 80 GB or more; about five minutes
    python benchmarks/bench_memory.py --device cpu --shapes tiny       # no memory is measured; that all cases run

The promises: LoRA of rank 16 at 2 x 512 tokens within 30 GB; what was foretold within a fifth of what was taken; merging gives
the bits that were tuned; 8 x 512 tokens over 262,144 words in less than a third of what whole logits take.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from common import LLAMA_8B, TINY, finish
from training import Clock, release, train
from transformers import AutoModelForCausalLM, LlamaConfig, logging

from otaro.sefp.precision import Precision
from otaro.tune import memory, sliced
from otaro.tune.config import BEST, Options
from otaro.tune.fake_quant import Precisely, merge_lora, narrow_frozen, prepare

LORA_BYTES = 30e9
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
WORDY = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "tie_word_embeddings": True}  # fmt: skip
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Bench:
    """The cases done so far, and what was promised of them."""

    device: str
    tiny: bool
    seconds: float
    rows: dict[str, Any] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def case(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Do one, whatever comes of it."""
        if time.perf_counter() - self.started > self.seconds:
            self.rows[name] = {"skipped": "out of time"}
        else:
            try:
                self.rows[name] = run()
            except Exception as error:
                traceback.print_exc()
                self.rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        row = self.rows[name]
        told = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
        print(f"{name:44} {told}", flush=True)
        release(self.device)

    def promise(self, words: str, kept: Callable[[], bool]) -> None:
        """Note whether it held; a case that failed keeps none."""
        try:
            held = bool(kept())
        except KeyError:
            held = False
        self.promises[words] = held
        print(f"{'holds ' if held else 'MISSED'} {words}", flush=True)

    def model(self, shapes: dict[str, Any], dtype: torch.dtype) -> Any:
        """One with random weights."""
        torch.manual_seed(0)
        with torch.device(self.device):
            config = LlamaConfig(**{**shapes, **TINY} if self.tiny else shapes, max_position_embeddings=8192)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    def lora(self, shapes: dict[str, Any], rank: int = 16) -> Any:
        """One in bfloat16 with adapters, as `otaro tune --lora` loads it."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS)
        model = get_peft_model(self.model(shapes, torch.bfloat16), config)
        narrow_frozen(model, torch.bfloat16)
        return model

    def train(self, model: Any, options: Options, batch: tuple[int, int], steps: int = 8, **more: Any) -> dict[str, Any]:
        """Seconds a step of the later half, and memory."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        clock = Clock(self.device)
        plan = train(model, options, (batch[0], 32) if self.tiny else batch, steps, clock, bf16=True, **more)
        seconds = clock.seconds()
        result: dict[str, Any] = {"seconds_a_step": statistics.median(seconds[len(seconds) // 2 :])}
        result["foretold_gb"] = plan.on_device / 1e9
        if self.device == "cuda":
            result["taken_gb"] = torch.cuda.max_memory_allocated() / 1e9
            result["held_gb"] = torch.cuda.max_memory_reserved() / 1e9
        result |= {"copies_on_host": plan.copies_on_host, "hold": plan.hold}
        return result


@contextmanager
def set_to(module: Any, name: str, value: Any) -> Iterator[None]:
    """For the time of a block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def merging(bench: Bench) -> dict[str, Any]:
    """Whether merged weights have the bits that a forward under autocast quantized."""
    lora = bench.lora({**LLAMA_8B, "num_hidden_layers": 2})
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    prepare(lora, precisely := Precisely())
    seen: list[torch.Tensor] = []
    values = precisely.values

    def watched(weight: torch.Tensor, *how: Any) -> torch.Tensor:
        seen.append(weight.detach().cpu())
        return values(weight, *how)

    object.__setattr__(precisely, "values", watched)
    ids = torch.zeros(1, 4, dtype=torch.long, device=bench.device)
    with torch.no_grad(), precisely.at(Precision("E5M4")), torch.autocast(bench.device, torch.bfloat16):
        lora(input_ids=ids)
    merged = merge_lora(lora)
    linears = [merged.model.layers[n].get_submodule(part) for n in range(len(merged.model.layers))
               for part in ("self_attn.q_proj", "mlp.down_proj")]  # fmt: skip
    equal = [any(w.shape == one.weight.shape and torch.equal(w, one.weight) for w in seen) for one in linears]
    return {"layers_compared": len(equal), "equal": sum(equal)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", choices=("real", "tiny"), default="real")
    parser.add_argument("--minutes", type=float, default=7.0, help="no case is begun later than this")
    a = parser.parse_args()
    logging.set_verbosity_error()
    bench = Bench(a.device, a.shapes == "tiny", 60 * a.minutes)
    rows = bench.rows

    first = "LLaMA-3-8B, LoRA 16, 2 x 512, best"
    bench.case(first, lambda: bench.train(bench.lora(LLAMA_8B), BEST, (2, 512)))
    bench.case("the same, activations recomputed", lambda: bench.train(
        bench.lora(LLAMA_8B), BEST, (2, 512), 6, gradient_checkpointing=True))  # fmt: skip
    bench.case("merging", lambda: merging(bench))
    one = "LLaMA-3.2-1B, all weights, 2 x 512, best"
    bench.case(one, lambda: bench.train(bench.model(LLAMA_1B, torch.float32), BEST, (2, 512)))
    if find_spec("bitsandbytes") is not None:
        bench.case("the same, adamw8bit", lambda: bench.train(
            bench.model(LLAMA_1B, torch.float32), BEST, (2, 512), optim="adamw_bnb_8bit"))  # fmt: skip
    with set_to(memory, "device_bytes", lambda device: 10_000):
        bench.case("the same, copies on the host, none held", lambda: bench.train(
            bench.model(LLAMA_1B, torch.float32), BEST, (2, 512)))  # fmt: skip
    words = "262,144 words, all weights, 8 x 512, best"
    bench.case(words, lambda: bench.train(bench.model(WORDY, torch.float32), BEST, (8, 512), 6))
    with set_to(sliced, "SLICE_BYTES", 1 << 50):
        bench.case("the same, whole logits", lambda: bench.train(bench.model(WORDY, torch.float32), BEST, (8, 512), 6))

    if a.device == "cuda":
        bench.promise("LoRA on 8B within 30 GB", lambda: rows[first]["held_gb"] * 1e9 <= LORA_BYTES)
        for name in (first, one, words):
            bench.promise(
                f"{name}: foretold within a fifth",
                lambda name=name: abs(rows[name]["foretold_gb"] / rows[name]["taken_gb"] - 1) <= 0.2,  # type: ignore[misc]
            )
        bench.promise(
            "262,144 words in a third of what whole logits take",
            lambda: rows[words]["taken_gb"] <= rows["the same, whole logits"]["taken_gb"] / 3,
        )
        print(torch.cuda.get_device_name())
    merged = rows["merging"]
    bench.promise("merging gives the bits that were tuned", lambda: merged["equal"] == merged["layers_compared"])
    finish({"benchmark": "memory", "device": a.device, "shapes": a.shapes, "rows": rows, "promises": bench.promises})


if __name__ == "__main__":
    main()
