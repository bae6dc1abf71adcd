"""Convert the SmolLM2 GGUF file to a Hugging Face directory in float16: python convert_gguf.py GGUF OUT.

The result holds the dequantized values of the GGUF file; it is not the model as it was before quantization.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from otaro.file.checkpoint import Checkpoint
from otaro.file.gguf_tokenizer import write_tokenizer


def report_rounding(exact: dict[str, torch.Tensor], rounded: dict[str, torch.Tensor]) -> None:
    """Print what float16 rounding did; stop on overflow."""
    tiny = torch.finfo(torch.float16).tiny  # below it float16 steps are absolute, not relative
    relative = absolute = 0.0
    small = zeroed = 0
    for name, before in exact.items():
        before, after = before.double(), rounded[name].double()
        if not bool(after.isfinite().all()):
            sys.exit(f"error: {name} does not fit in float16")
        error = (after - before).abs()
        normal = before.abs() >= tiny
        if bool(normal.any()):
            relative = max(relative, float((error[normal] / before[normal].abs()).max()))
        if not bool(normal.all()):
            absolute = max(absolute, float(error[~normal].max()))
        small += int(((before != 0) & ~normal).sum())
        zeroed += int(((before != 0) & (after == 0)).sum())
    print(f"parameters: {sum(tensor.numel() for tensor in exact.values()):,}")
    print(f"float16 rounding, values >= {tiny:.2e}: max relative error {relative:.3e}")
    print(f"float16 rounding, {small:,} smaller values: max absolute error {absolute:.3e}, {zeroed:,} became 0")


def convert(gguf: Path, out: Path) -> None:
    """Write config, weights, generation config, tokenizer and chat template of `gguf` to `out`."""
    checkpoint = Checkpoint(gguf)
    exact = {name: checkpoint.read(name) for name in checkpoint.shapes}
    rounded = {name: tensor.half() for name, tensor in exact.items()}
    report_rounding(exact, rounded)
    out.mkdir()
    save_file(rounded, out / "model.safetensors", {"format": "pt"})
    checkpoint.config.save_pretrained(out)
    GenerationConfig.from_model_config(checkpoint.config).save_pretrained(out)
    assert checkpoint.gguf is not None
    if why := write_tokenizer(checkpoint.gguf.fields, out, checkpoint.config.max_position_embeddings):
        sys.exit(f"error: {why}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
