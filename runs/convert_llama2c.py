"""Convert a model of llama2.c to a Hugging Face directory: python convert_llama2c.py MODEL TOKENIZER OUT.

MODEL is llama2.c's model.bin of the first kind: seven int32 (width, hidden width, layers, heads, key-value
heads, vocabulary, positions) and then the weights as float32, nothing else. TOKENIZER is its tokenizer.bin: a
longest length, then score, length and bytes of each token, which is all that the LLaMA tokenizer is made of.
Both are taken over exactly, in float32; q and k change the order of their rows, since llama2.c rotates
neighbouring pairs of a head and transformers its two halves.
"""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from otaro.file.gguf_tokenizer import BYTE, CONTROL, NORMAL, write_tokenizer

HEADER = "<7i"
UNKNOWN, BEGIN, END, BYTES = 0, 1, 2, 3  # ids; then 256 tokens for the bytes that no other token holds


def read_model(path: Path) -> LlamaForCausalLM:
    content = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from(HEADER, content)
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    values = torch.from_numpy(np.frombuffer(content, "<f4", offset=struct.calcsize(HEADER)).copy())
    size, at = width // heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        if at > len(values):
            sys.exit(f"error: {path} ends within its weights")
        return values[at - count : at].view(shape)

    def halves(rows: torch.Tensor) -> torch.Tensor:
        """Of each head first the even rows, then the odd ones."""
        return rows.view(-1, size // 2, 2, width).transpose(1, 2).reshape(-1, width)

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        rms_norm_eps=1e-5, tie_word_embeddings=tied, bos_token_id=BEGIN, eos_token_id=END,
    )  # fmt: skip
    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    stacks = {  # in the order of the file
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": take(layers, width, width),
        "self_attn.k_proj": take(layers, kv_heads * size, width),
        "self_attn.v_proj": take(layers, kv_heads * size, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, hidden, width),
        "mlp.down_proj": take(layers, width, hidden),
        "mlp.up_proj": take(layers, hidden, width),
    }
    for name, stack in stacks.items():
        for layer, weight in enumerate(stack):
            turned = halves(weight) if name.endswith(("q_proj", "k_proj")) else weight
            state[f"model.layers.{layer}.{name}.weight"] = turned
    state["model.norm.weight"] = take(width)
    take(positions, size)  # tables of the rotations, which transformers computes itself
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else take(vocabulary, width)
    if at != len(values):
        sys.exit(f"error: {path} holds {len(values):,} numbers, its header describes {at:,}")
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


def write_llama_tokenizer(path: Path, vocabulary: int, positions: int, out: Path) -> None:
    """The tokens and scores as a GGUF file states them, of which a tokenizer is made as of any such file."""
    content, at = path.read_bytes(), 4
    tokens, scores = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))], []
    for number in range(vocabulary):
        score, length = struct.unpack_from("<fi", content, at)
        at += 8 + length
        scores.append(score)
        if number >= BYTES + 256:
            tokens.append(content[at - length : at].decode().replace(" ", "▁"))
    if len(set(tokens)) != vocabulary or at != len(content):
        sys.exit(f"error: {path} does not hold {vocabulary:,} different tokens and nothing else")
    kinds = [CONTROL] * BYTES + [BYTE] * 256 + [NORMAL] * (vocabulary - BYTES - 256)
    stated: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    stated |= {"unknown_token_id": UNKNOWN, "bos_token_id": BEGIN, "eos_token_id": END}
    fields = {f"tokenizer.ggml.{name}": value for name, value in stated.items()}
    if why := write_tokenizer(fields, out, positions):
        sys.exit(f"error: {why}")


def convert(model_file: Path, tokenizer_file: Path, out: Path) -> None:
    model = read_model(model_file)
    model.save_pretrained(out)
    write_llama_tokenizer(tokenizer_file, model.config.vocab_size, model.config.max_position_embeddings, out)
    print(f"parameters: {model.num_parameters():,}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    convert(*map(Path, sys.argv[1:]))
