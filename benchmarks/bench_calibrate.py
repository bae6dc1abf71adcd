"""How long `otaro pack --calibrate` takes for LLaMA-3-8B: random layers are timed, the rest extrapolated.

    python benchmarks/bench_calibrate.py --device cuda      # 128 x 512 tokens; 10 GB of disk in --folder
    python benchmarks/bench_calibrate.py --shapes tiny --layers 2 --samples 4   # that it runs

The checkpoint has `--layers` layers, an embedding and a head of the true size. Told are seconds for what
comes before the first layer, for each layer (the first one warms up and counts for itself alone), for the
head, and for the writing at the end, and what they come to with 32 layers: below 15 minutes on an H200.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import LLAMA_8B, TINY, arguments, finish
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from otaro.calibrate import run, text
from otaro.evaluate.machine import device_name

SHAPES = {"llama-3-8b": LLAMA_8B, "tiny": TINY}
LAYERS = LLAMA_8B["num_hidden_layers"]


class Words:
    """A tokenizer of so many words: the text is numbers."""

    bos_token_id = None

    def __call__(self, content: str, **options: Any) -> dict[str, torch.Tensor]:
        """The numbers, as ids."""
        return {"input_ids": torch.tensor([[int(word) for word in content.split()]])}


def write_random(directory: Path, layers: int, shape: dict[str, int], device: str) -> None:
    """A checkpoint of random weights, bfloat16."""
    config = LlamaConfig(**{**shape, "num_hidden_layers": layers}, rms_norm_eps=1e-5, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    tensors = {}
    for name, one in model.state_dict().items():
        norm = "norm" in name
        made = torch.ones(one.shape) if norm else torch.randn(one.shape, device=device).mul_(0.02).cpu()
        tensors[name] = made.bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=3, help="layers to time, two at least")
    parser.add_argument("--samples", type=int, default=run.SAMPLES, help="windows of 512 tokens")
    parser.add_argument("--shapes", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--folder", type=Path, help="where to write checkpoint and model, then removed")
    asked = parser.parse_args()
    shape, layers = SHAPES[asked.shapes], range(1, asked.layers + 1)
    text.load_tokenizer = lambda directory: Words()
    words = torch.randint(0, shape["vocab_size"], (asked.samples * text.LENGTH,)).tolist()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        write_random(Path(folder) / "model", asked.layers, shape, asked.device)
        moments: dict[str, float] = {}

        def note(what: str, done: int, total: int) -> None:
            moments.setdefault(what, time.perf_counter())

        where, content = (Path(folder) / "model", Path(folder) / "out"), " ".join(map(str, words))
        started = time.perf_counter()
        run.pack_calibrated(*where, content, samples=asked.samples, device=asked.device, progress=note)
        ended = time.perf_counter()
    begins = [moments[f"layer {number} of {asked.layers}"] for number in layers]
    first, *others = (later - begin for begin, later in pairwise([*begins, moments["head"]]))
    parts = {
        "before the first layer": begins[0] - started,
        "first layer": first,
        "a layer": statistics.median(others),
        "head": moments["packing"] - moments["head"],
        "writing": ended - moments["packing"],
    }
    times = {"a layer": LAYERS - 1, "writing": LAYERS / asked.layers}
    total = sum(times.get(name, 1) * seconds for name, seconds in parts.items())
    for name, seconds in parts.items():
        print(f"{name:24} {seconds:8.1f} s")
    minutes = f"{total / 60:.1f} minutes (writing by layers, at most)"
    print(f"{f'all of it, {LAYERS} layers':24} {total:8.1f} s = {minutes}")
    peak = torch.cuda.max_memory_allocated() if asked.device.startswith("cuda") else None
    about = {"device": device_name(asked.device), "samples": asked.samples}
    finish({**about, "seconds": parts, "total_s": total, "peak_bytes": peak})


if __name__ == "__main__":
    main()
