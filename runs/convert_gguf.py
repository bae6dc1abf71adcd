"""Convert the SmolLM2 GGUF file to a Hugging Face directory in float16: python convert_gguf.py GGUF OUT.

The result holds the dequantized values of the GGUF file; it is not the model as it was before quantization.
"""

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_half(gguf: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model in float16 with no trace of the GGUF quantizer, and its float32 values before rounding."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    exact = loaded.state_dict()
    # A model loaded from GGUF refuses a change of dtype and keeps a quantization_config, hence a fresh one.
    settings = loaded.config.to_dict()
    for leftover in ("quantization_config", "_model_name_or_path"):
        settings.pop(leftover, None)
    model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(exact, strict=True)
    model.generation_config = loaded.generation_config
    return model.half().eval(), exact


def report_rounding(exact: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Print what float16 rounding did; stop on overflow."""
    tiny = torch.finfo(torch.float16).tiny  # below it float16 steps are absolute, not relative
    relative = absolute = 0.0
    small = zeroed = 0
    for name, rounded in model.named_parameters():  # a tied weight comes once
        before = exact[name].double()
        after = rounded.detach().double()
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
    print(f"parameters: {model.num_parameters():,}")
    print(f"float16 rounding, values >= {tiny:.2e}: max relative error {relative:.3e}")
    print(f"float16 rounding, {small:,} smaller values: max absolute error {absolute:.3e}, {zeroed:,} became 0")


def convert(gguf: Path, out: Path) -> None:
    """Write config, weights, generation config, tokenizer and chat template of `gguf` to `out`."""
    model, exact = load_half(gguf)
    report_rounding(exact, model)
    model.save_pretrained(out)

    if GGUFReader(gguf).fields["tokenizer.ggml.pre"].contents() != "smollm":
        sys.exit("error: not a SmolLM tokenizer; its splitting rules are unknown here")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # "smollm" means that digits are split off first; transformers leaves this out when it reads a GGUF file.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
