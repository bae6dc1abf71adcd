"""Convert a llama2.c model to a Hugging Face directory in float32: python convert_llama2c.py MODEL TOKENIZER OUT.

MODEL is llama2.c's model.bin of the first kind: seven int32 (width, hidden width, layers, heads, key-value heads, vocabulary,
positions) and then the weights as float32, nothing else. TOKENIZER is its tokenizer.bin: a longest length, then score, length
and bytes of each token, which is all that the LLaMA tokenizer is made of. Both are taken over exactly; q and k change the order
of their rows, since llama2.c rotates neighbouring pairs of a head and transformers its two halves.
"""

import struct
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=positions, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        bos_token_id=BEGIN, eos_token_id=END,
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


def read_tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    """The LLaMA tokenizer: pairs are merged in the order of the scores, what is unknown is spelt in bytes."""
    content, at = path.read_bytes(), 4
    ids: dict[str, int] = {}
    scores: list[float] = []
    for number in range(vocabulary):
        score, length = struct.unpack_from("<fi", content, at)
        token = content[at + 8 : at + 8 + length]
        at += 8 + length
        scores.append(score)
        if number <= END:
            name = ("<unk>", "<s>", "</s>")[number]
        elif number < BYTES + 256:
            name = f"<0x{number - BYTES:02X}>"
        else:
            name = token.decode().replace(" ", "▁")
        ids[name] = number
    if len(ids) != vocabulary or at != len(content):
        sys.exit(f"error: {path} does not hold {vocabulary:,} different tokens and nothing else")
    pairs = [
        (scores[number], ids[left], ids[right], left, right)
        for token, number in ids.items()
        if number >= BYTES + 256
        for cut in range(1, len(token))
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))]
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BEGIN)])
    return tokenizer


def convert(model_file: Path, tokenizer_file: Path, out: Path) -> None:
    model = read_model(model_file)
    model.save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read_tokenizer(tokenizer_file, model.config.vocab_size),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=model.config.max_position_embeddings,
    )  # fmt: skip
    tokenizer.save_pretrained(out)
    print(f"parameters: {model.num_parameters():,}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    convert(*map(Path, sys.argv[1:]))
