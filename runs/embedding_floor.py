"""Should embedding and head follow the decoder down to E5M3, or stop at a floor? Perplexity for each answer.

    otaro pack models/SmolLM2-135M models/SmolLM2-135M-sefp
    python runs/embedding_floor.py models/SmolLM2-135M-sefp --text wiki.test.raw

Each line gives the precision of the decoder's linears, that of token embedding and output head, what the pair costs in bits
per weight over the whole model, and the perplexity it buys.
"""

import argparse
import json
from math import prod
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import otaro
from otaro.evaluate.perplexity import perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity by precision of the decoder and of embedding and head.")
    parser.add_argument("model", type=Path, help="a nested directory")
    parser.add_argument("--text", type=Path, required=True, help="the text to measure on")
    parser.add_argument("--tokens", type=int, default=None, help="use the first so many tokens (default: all)")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a window, windows side by side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(arguments.text.read_text(), return_tensors="pt")["input_ids"][0][: arguments.tokens]
    model = otaro.load(arguments.model, device=arguments.device, dtype=torch.float32)
    packed = model.sefp.nested.schema.packed
    total = sum(map(prod, packed.values()))
    outer = sum(prod(shape) for name, shape in packed.items() if "embed_tokens" in name or "lm_head" in name)
    print(f"{len(ids)} tokens, windows of {arguments.window}; embedding and head are {outer / total:.1%} of the weights")

    table: dict[str, dict[str, float]] = {}
    for decoder in otaro.PRECISIONS:
        row = table[str(decoder)] = {}
        for floor in [p for p in otaro.PRECISIONS if p >= decoder]:
            patterns = {"*": decoder, "model.embed_tokens": floor, "lm_head": floor}
            with otaro.at_precision(model, patterns):
                row[str(floor)] = perplexity(model, ids, window=arguments.window)
            bits = decoder.bits_per_weight() + (floor.mantissa_bits - decoder.mantissa_bits) * outer / total
            print(f"decoder {decoder}  embedding and head {floor}  {bits:.2f} bits  {row[str(floor)]:.3f}", flush=True)
    print(json.dumps({"model": arguments.model.name, "tokens": len(ids), "window": arguments.window, "perplexity": table}))


if __name__ == "__main__":
    main()
