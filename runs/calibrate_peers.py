"""Other formats beside ours: llama.cpp's types with an importance matrix, and int4 of a library's GPTQ, from the same text.

    otaro export models/SmolLM2-135M-sefp f16.gguf --precision E5M8 --to gguf        # what is quantized: F16, near the original
    python runs/calibrate_peers.py importance models/SmolLM2-135M --text valid.txt --out importance.npz
    VENV_WITH_LLAMA_CPP/bin/python runs/calibrate_peers.py quantize f16.gguf --importance importance.npz --out FOLDER
    VENV_WITH_LLMCOMPRESSOR/bin/python runs/calibrate_peers.py gptq models/SmolLM2-135M --text valid.txt --out FOLDER/GPTQ-64
    python runs/calibrate_peers.py measure models/SmolLM2-135M FOLDER/* NESTED... --text test.txt --tokens 32768

`importance` has for every matrix the mean square of each input, which is what llama.cpp's own tool collects. `gptq` is that of
llm-compressor (`pip install llmcompressor`), int4 with a float16 scale per group, columns in its static order; embedding and
head stay in float16, as it leaves them. All see the windows of text that `otaro pack --calibrate` sees. `measure` takes values
out of the files (GGUF types and compressed-tensors dequantized, nested models at E5M3 to E5M5) and reads the text with them by
transformers in float32, in the windows of `otaro eval`: what is compared is weights, not kernels. Bits are those of all
tensors, norms too.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

KINDS = {"Q4_0": 2, "Q4_K_M": 15, "Q5_K_M": 17}  # llama_ftype
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def calibration_windows(arguments: argparse.Namespace, config: Any) -> Any:
    """The tokens that `otaro pack --calibrate` would take."""
    from transformers import AutoTokenizer

    from otaro.calibrate import text

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    length = min(text.LENGTH, config.max_position_embeddings)
    return text.windows(arguments.text.read_text(), tokenizer, arguments.samples, length)


def importance(arguments: argparse.Namespace) -> None:
    """Mean squares of the inputs of every matrix of a LLaMA, under GGUF's names."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device).eval()
    sums: dict[str, Any] = {}

    def watched(name: str) -> Any:
        def add(module: Any, inputs: Any) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().mean(0)

        return add

    for number, layer in enumerate(model.model.layers):
        for path, name in _NAMES.items():
            layer.get_submodule(path).register_forward_pre_hook(watched(f"blk.{number}.{name}.weight"))
    model.get_output_embeddings().register_forward_pre_hook(watched("output.weight"))
    with torch.inference_mode():
        for some in calibration_windows(arguments, model.config).split(4):
            model(some.to(arguments.device), use_cache=False)
    np.savez(arguments.out, **{name: value.cpu().numpy() for name, value in sums.items()})


def quantize(arguments: argparse.Namespace) -> None:
    """All kinds, with and without the importance matrix."""
    import numpy as np

    llama_cpp = importlib.import_module("llama_cpp")
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = dict(np.load(arguments.importance))
    arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in known.items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()  # ends in an entry without a name
    for entry, (name, value) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), value.size
        entry.data = value.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for kind, number in KINDS.items():
        for weighed in (False, True):
            parameters = llama_cpp.llama_model_quantize_default_params()
            parameters.ftype, parameters.nthread = number, arguments.threads
            if weighed:
                parameters.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
            out = arguments.out / f"{kind}{'-imatrix' if weighed else ''}.gguf"
            code = llama_cpp.llama_model_quantize(str(arguments.gguf).encode(), str(out).encode(), ctypes.byref(parameters))
            print(out, "failed" if code else out.stat().st_size)


def gptq(arguments: argparse.Namespace) -> None:
    """Int4 by llm-compressor, written as compressed-tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    datasets = importlib.import_module("datasets")
    llmcompressor = importlib.import_module("llmcompressor")
    modifiers = importlib.import_module("llmcompressor.modifiers.gptq")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    ids = calibration_windows(arguments, model.config)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": arguments.group_size}
    groups = {"int4": {"targets": ["Linear"], "weights": weights}}
    llmcompressor.oneshot(
        model=model,
        dataset=datasets.Dataset.from_dict({"input_ids": ids.tolist()}),
        recipe=modifiers.GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )
    model.half().save_pretrained(arguments.out, save_compressed=True)


def measure(arguments: argparse.Namespace) -> None:
    """Perplexity on a text or its beginning, and bits per weight."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

    import otaro
    from otaro.evaluate.meters import Loss
    from otaro.evaluate.text import read_text
    from otaro.evaluate.windows import ModelReader, Windows, choose_window, read
    from otaro.file.checkpoint import Checkpoint
    from otaro.runtime.precision import set_precision
    from otaro.tokens import begins_with_bos

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    bos, ids = begins_with_bos(tokenizer), read_text(str(arguments.text)).ids(tokenizer)[: arguments.tokens]
    windows = Windows(ids, choose_window(model.config), None, bos)
    weights = sum(parameter.numel() for parameter in model.parameters())

    def row(name: str, bits: float | None) -> dict[str, Any]:
        loss = Loss(bos is not None)
        read(ModelReader(model, comparing=False), windows, [loss], lambda done, total: None)
        print(f"{name:40} {'' if bits is None else f'{bits:.2f} bits':>10} {loss.perplexity:9.3f}", flush=True)
        return {"name": name, "bits": bits, "perplexity": loss.perplexity}

    def take(read: Callable[[str], Any]) -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(read(name))

    rows = [row("full", None)]
    for path in arguments.models:
        if path.is_file():
            checkpoint = Checkpoint(path)
            take(checkpoint.read)
            rows.append(row(path.stem, 8 * sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors) / weights))
        elif (path / "model-m3.safetensors").is_file():
            nested = otaro.load(path)
            for precision in ("E5M5", "E5M4", "E5M3"):
                set_precision(nested, precision)
                take(lambda name, nested=nested: attrgetter(name)(nested))  # type: ignore[misc]
                size = sum((path / f"model-m{plane}.safetensors").stat().st_size for plane in range(3, int(precision[-1]) + 1))
                rows.append(row(f"{path.name} {precision}", 8 * size / weights))
        else:
            plain = CompressedTensorsConfig(run_compressed=False)
            quantized = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=plain)
            take(quantized.get_parameter)
            rows.append(row(path.name, 8 * sum(file.stat().st_size for file in path.glob("*.safetensors")) / weights))
    print(json.dumps({"model": str(arguments.model), "tokens": len(ids), "rows": rows}))


def main() -> None:
    """One of the steps."""
    parser = argparse.ArgumentParser(description="Other formats beside ours.")
    steps = parser.add_subparsers(required=True)
    first = steps.add_parser("importance")
    second = steps.add_parser("quantize")
    second.add_argument("gguf", type=Path)
    second.add_argument("--importance", type=Path, required=True)
    second.add_argument("--threads", type=int, default=2)
    second.set_defaults(step=quantize)
    third = steps.add_parser("gptq")
    third.add_argument("--group-size", type=int, default=64)
    last = steps.add_parser("measure")
    for step, does in ((first, importance), (third, gptq), (last, measure)):
        step.add_argument("model", type=Path)
        step.add_argument("--text", type=Path, required=True)
        step.set_defaults(step=does)
    for step in (first, third):
        step.add_argument("--samples", type=int, default=128)
    for step in (first, second, third):
        step.add_argument("--out", type=Path, required=True)
    for step in (first, last):
        step.add_argument("--device", default="cpu")
    last.add_argument("models", type=Path, nargs="+")
    last.add_argument("--tokens", type=int, help="of the text's beginning; all by default")
    arguments = parser.parse_args()
    arguments.step(arguments)


if __name__ == "__main__":
    main()
