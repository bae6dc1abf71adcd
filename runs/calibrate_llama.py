"""llama.cpp's types beside ours: its quantizer on the same model, with an importance matrix from the same text.

    otaro export models/SmolLM2-135M-sefp f16.gguf --precision E5M8 --to gguf        # what is quantized: F16, near the original
    python runs/calibrate_llama.py importance models/SmolLM2-135M --text valid.txt --out importance.npz
    VENV_WITH_LLAMA_CPP/bin/python runs/calibrate_llama.py quantize f16.gguf --importance importance.npz --out FOLDER
    python runs/calibrate_llama.py measure models/SmolLM2-135M FOLDER/*.gguf NESTED... --text test.txt --windows 64

`importance` has for every matrix the mean square of each input, which is what llama.cpp's own tool collects. `measure` takes
values out of the files (GGUF types dequantized, nested models at E5M3 to E5M5) and reads the text with them by transformers
in float32: what is compared is weights, not kernels. Bits are those of the whole model, norms and all.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
from pathlib import Path
from typing import Any

KINDS = {"Q4_0": 2, "Q4_K_M": 15, "Q5_K_M": 17}  # llama_ftype
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def importance(arguments: argparse.Namespace) -> None:
    """Mean squares of the inputs of every matrix of a LLaMA, under GGUF's names."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from otaro.calibrate import text

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
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    length = min(text.LENGTH, model.config.max_position_embeddings)
    ids = text.windows(Path(arguments.text).read_text(), tokenizer, arguments.windows, length)
    with torch.inference_mode():
        for some in ids.split(4):
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


def measure(arguments: argparse.Namespace) -> None:
    """Perplexity on the first windows of a text, and bits per weight."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import otaro
    from otaro.calibrate import text
    from otaro.evaluate.perplexity import perplexity
    from otaro.file.checkpoint import Checkpoint
    from otaro.runtime.precision import set_precision
    from otaro.tokens import begins_with_bos

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    window, bos = min(text.LENGTH, model.config.max_position_embeddings), begins_with_bos(tokenizer)
    ids = tokenizer(Path(arguments.text).read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    ids = ids[bos is not None :][: arguments.windows * (window - (bos is not None))]
    weights = sum(parameter.numel() for parameter in model.parameters())

    def row(name: str, bits: float | None) -> dict[str, Any]:
        found = perplexity(model, ids, window=window, bos=bos)
        print(f"{name:40} {'' if bits is None else f'{bits:.2f} bits':>10} {found:9.3f}", flush=True)
        return {"name": name, "bits": bits, "perplexity": found}

    rows = [row("full", None)]
    for path in arguments.models:
        if path.is_file():
            checkpoint = Checkpoint(path)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(checkpoint.read(name))
            rows.append(row(path.stem, 8 * path.stat().st_size / weights))
            continue
        nested = otaro.load(path)
        for precision in ("E5M5", "E5M4", "E5M3"):
            set_precision(nested, precision)
            for name, parameter in model.named_parameters():
                owner, _, last = name.rpartition(".")
                parameter.data.copy_(getattr(nested.get_submodule(owner), last))
            size = sum((path / f"model-m{plane}.safetensors").stat().st_size for plane in range(3, int(precision[-1]) + 1))
            rows.append(row(f"{path.name} {precision}", 8 * size / weights))
    print(json.dumps({"model": str(arguments.model), "tokens": len(ids), "rows": rows}))


def main() -> None:
    """One of the three steps."""
    parser = argparse.ArgumentParser(description="llama.cpp's types beside ours.")
    steps = parser.add_subparsers(required=True)
    first = steps.add_parser("importance")
    first.add_argument("model", type=Path)
    first.add_argument("--text", required=True)
    first.add_argument("--out", type=Path, required=True)
    first.add_argument("--windows", type=int, default=128)
    first.add_argument("--device", default="cpu")
    first.set_defaults(step=importance)
    second = steps.add_parser("quantize")
    second.add_argument("gguf", type=Path)
    second.add_argument("--importance", type=Path, required=True)
    second.add_argument("--out", type=Path, required=True)
    second.add_argument("--threads", type=int, default=2)
    second.set_defaults(step=quantize)
    third = steps.add_parser("measure")
    third.add_argument("model", type=Path)
    third.add_argument("models", type=Path, nargs="+")
    third.add_argument("--text", required=True)
    third.add_argument("--windows", type=int, default=512)
    third.add_argument("--device", default="cpu")
    third.set_defaults(step=measure)
    arguments = parser.parse_args()
    arguments.step(arguments)


if __name__ == "__main__":
    main()
