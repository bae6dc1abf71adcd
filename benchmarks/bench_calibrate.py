"""How long `otaro pack --calibrate` takes for LLaMA-3-8B's shapes: a few random layers are timed, the rest is
extrapolated.

    python benchmarks/bench_calibrate.py --device cuda                          # 128 x 512 tokens; 10 GB of disk in --folder
    python benchmarks/bench_calibrate.py --shapes tiny --layers 2 --samples 4   # that it runs

The checkpoint has `--layers` layers, an embedding and a head of the true size. Told are seconds for what
comes before the first layer, for each layer (the first one warms up and counts for itself alone), for the
head, and for the writing at the end, and what they come to with 32 layers. The bar: below 15 minutes on an
H200.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import LLAMA_8B, TINY, finish
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
    tensors = {
        name: torch.ones(one.shape)
        if "norm" in name
        else torch.randn(one.shape, device=device).mul_(0.02).cpu()
        for name, one in model.state_dict().items()
    }
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds that a calibration of LLaMA-3-8B's shapes takes.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=3, help="layers to time, two at least")
    parser.add_argument("--samples", type=int, default=run.SAMPLES, help="windows of 512 tokens")
    parser.add_argument("--shapes", choices=SHAPES, default="llama-3-8b")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write checkpoint and model, then removed"
    )
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shapes]
    text.load_tokenizer = lambda directory: Words()
    ids = torch.randint(0, shape["vocab_size"], (arguments.samples * text.LENGTH,))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_random(Path(folder) / "model", arguments.layers, shape, arguments.device)
        moments: dict[str, float] = {}

        def note(what: str, done: int, total: int) -> None:
            moments.setdefault(what, time.perf_counter())

        started = time.perf_counter()
        run.pack_calibrated(
            Path(folder) / "model",
            Path(folder) / "out",
            " ".join(map(str, ids.tolist())),
            samples=arguments.samples,
            device=arguments.device,
            progress=note,
        )
        ended = time.perf_counter()
    begins = [moments[f"layer {number} of {arguments.layers}"] for number in range(1, arguments.layers + 1)]
    first, *others = (later - begin for begin, later in pairwise([*begins, moments["head"]]))
    parts = {
        "before the first layer": begins[0] - started,
        "first layer": first,
        "a layer": statistics.median(others),
        "head": moments["packing"] - moments["head"],
        "writing": ended - moments["packing"],
    }
    times = {"a layer": LAYERS - 1, "writing": LAYERS / arguments.layers}
    total = sum(times.get(name, 1) * seconds for name, seconds in parts.items())
    for name, seconds in parts.items():
        print(f"{name:24} {seconds:8.1f} s")
    print(
        f"{f'all of it, {LAYERS} layers':24} {total:8.1f} s = {total / 60:.1f} minutes (writing by "
        "layers, at most)"
    )
    peak = torch.cuda.max_memory_allocated() if arguments.device.startswith("cuda") else None
    about = {"device": device_name(arguments.device), "samples": arguments.samples}
    finish({**about, "seconds": parts, "total_s": total, "peak_bytes": peak})


if __name__ == "__main__":
    main()
