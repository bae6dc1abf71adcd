"""Convert the SmolLM2 GGUF file to a Hugging Face directory in float16: python convert_gguf.py GGUF OUT.

The result holds the dequantized values of the GGUF file; it is not the model as it was before quantization.
"""

import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import GenerationConfig

from otaro.file.checkpoint import Checkpoint
from otaro.file.gguf_tokenizer import write_tokenizer


def convert(gguf: Path, out: Path) -> None:
    """Write config, weights, generation config, tokenizer and chat template of `gguf` to `out`."""
    checkpoint = Checkpoint(gguf)
    rounded = {name: checkpoint.read(name).half() for name in checkpoint.shapes}
    if overflowed := [name for name, tensor in rounded.items() if not tensor.isfinite().all()]:
        sys.exit(f"error: {overflowed[0]} does not fit in float16")
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
