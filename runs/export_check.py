"""Why llama.cpp does not say what we say of the same weights: each of its files beside ours, and its rounding done by torch.

    python runs/export_check.py models/SmolLM2-135M-sefp --text wikitext-2/test.txt
    python runs/export_check.py models/SmolLM2-135M-sefp --text wikitext-2/test.txt --layers 1

A nested model at one precision, exported to GGUF in several types that all hold it exactly, is read by llama.cpp
(llama-cpp-python must be installed), by our decoder, and by transformers in float32; and by transformers with the inputs of
every product rounded as llama.cpp rounds them before it multiplies with blocks: to Q8_0, 32 at a time to 8 bits. For each:
perplexity on the first tokens of a text, the mean divergence from ours and from llama.cpp's smallest file, and how many of
eight prompts are continued as by these, by 40 greedy tokens.

What rounds in the same way lies close together, in the first layer: there torch has the logits of llama.cpp. A difference d
moves a share d / step of the inputs of the next layer into another step, which is a difference of sqrt(d step): after some
layers it is as large as the rounding itself, and only its size can be compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import otaro
from otaro.evaluate.meters import Loss
from otaro.evaluate.text import read_text
from otaro.evaluate.windows import Windows
from otaro.export.run import export
from otaro.tokens import begins_with_bos

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was",
    "In 1969, two astronauts",
    "The recipe needs flour, sugar and",
    "Computers work by",
    "The river flows through the valley and",
    "A good teacher should",
    "The results of the experiment show that",
)
LENGTH = 40


@dataclass
class Contender:
    """Something that reads tokens and goes on with them."""

    name: str
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Of a window of tokens, at every position."""
    said: Callable[[list[int]], list[int]]
    """The tokens after a prompt."""


def to_q8_0(x: torch.Tensor) -> torch.Tensor:
    """What llama.cpp multiplies with blocks: of every 32 inputs the largest is 127 steps, a step is a float16."""
    blocks = x.reshape(-1, 32)
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * torch.where(steps > 0, 1 / steps, 0.0)).round()
    return (codes * steps.half().float()).reshape(x.shape)


def by_torch(name: str, model: Any) -> Contender:
    """A transformers model, ours among them."""

    @torch.inference_mode()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(ids[None], use_cache=False).logits[0]
        return found.float()

    def said(prompt: list[int]) -> list[int]:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
        tokens: list[int] = whole[0, len(prompt) :].tolist()
        return tokens

    return Contender(name, logits, said)


def by_llama(name: str, path: Path, a: argparse.Namespace) -> Contender:
    """llama.cpp."""
    llama_cpp = importlib.import_module("llama_cpp")
    cache = llama_cpp.GGML_TYPE_F16 if a.float16_cache else llama_cpp.GGML_TYPE_F32
    sizes = {"n_ctx": a.window, "n_batch": a.window, "n_threads": a.threads, "n_threads_batch": a.threads}
    model = llama_cpp.Llama(str(path), **sizes, type_k=cache, type_v=cache, logits_all=True, verbose=False)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        model.reset()
        model.eval(ids.tolist())
        return torch.tensor(model.scores[: len(ids)])

    def said(prompt: list[int]) -> list[int]:
        model.reset()
        tokens: list[int] = []
        for _ in range(LENGTH):
            model.eval(tokens[-1:] or prompt)
            tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        return tokens

    return Contender(name, logits, said)


def shortened(model: Path, layers: int, folder: Path) -> Path:
    """The first layers of a nested model, packed anew: weights may move a little."""
    export(model, folder / "whole", precision="E5M8", to="hf")
    whole = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)
    whole.model.layers = whole.model.layers[:layers]
    whole.config.num_hidden_layers = layers
    for saved in (whole, AutoTokenizer.from_pretrained(model)):
        saved.save_pretrained(folder / "short")
    otaro.pack(folder / "short", folder / "nested")
    return folder / "nested"


def contenders(a: argparse.Namespace, folder: Path) -> list[Contender]:
    """Ours, torch with and without rounding, then llama.cpp on each type."""
    model = shortened(a.model, a.layers, folder) if a.layers else a.model
    found = [by_torch("otaro", otaro.load(model, a.precision))]
    export(model, folder / "hf", precision=a.precision, to="hf")
    plain, rounded = (AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval() for _ in range(2))
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (to_q8_0(inputs[0]),))
    found += [by_torch("torch, float32", plain), by_torch("torch, inputs as Q8_0", rounded)]
    for kind in a.types:
        path = folder / f"{kind}.gguf"
        if not export(model, path, precision=a.precision, to="gguf", type=kind).exact:
            raise SystemExit(f"error: {kind} does not hold {a.precision} exactly; give other --types")
        found.append(by_llama(f"llama.cpp, {kind}", path, a))
    return found


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL of q from p, both logits."""
    return float(torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"))


def main() -> None:
    """Print the table, and a line of JSON."""
    parser = argparse.ArgumentParser(description="llama.cpp's files of one precision beside our own decoder.")
    parser.add_argument("model", type=Path, help="a nested directory")
    parser.add_argument("--precision", default="E5M3")
    parser.add_argument("--types", nargs="+", default=["Q4_0", "F16", "F32"], help="of GGUF, the smallest first")
    parser.add_argument("--layers", type=int, help="of a model of LLaMA's kind, that many only")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--float16-cache", action="store_true", help="keys and values in float16, as llama.cpp has them if not asked"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    bos = begins_with_bos(tokenizer)
    ids = read_text(str(a.text)).ids(tokenizer)[: a.tokens]
    with tempfile.TemporaryDirectory() as folder:
        every = contenders(a, Path(folder))
        smallest = len(every) - len(a.types)
        losses, apart = [Loss(bos is not None) for _ in every], [[0.0, 0.0] for _ in every]
        windows = list(Windows(ids, a.window, None, bos))
        for window in windows:
            logits = [one.logits(window.ids) for one in every]
            for at, (loss, own) in enumerate(zip(losses, logits, strict=True)):
                loss.add(window, 0, None, own)
                for other, base in enumerate((0, smallest)):
                    apart[at][other] += divergence(logits[base], own) / len(windows)
        said = [[one.said(tokenizer(prompt).input_ids) for prompt in PROMPTS] for one in every]
    layers = f", {a.layers} layers" if a.layers else ""
    print(f"{a.model.name}{layers} at {a.precision}: {len(ids)} tokens in windows of {a.window}; {len(PROMPTS)} prompts")
    head = f"{'':24}{'perplexity':>11}{'':>8}{'KL from ours':>15}"
    print(head + f"{f'from {a.types[0]}':>12}{'said as ours':>15}{f'as {a.types[0]}':>9}")
    rows = []
    for one, loss, kl, texts in zip(every, losses, apart, said, strict=True):
        same = [sum(x == y for x, y in zip(texts, said[of], strict=True)) for of in (0, smallest)]
        worse = loss.perplexity / losses[0].perplexity - 1
        print(f"{one.name:24}{loss.perplexity:11.4f}{worse:+8.2%}{kl[0]:15.6f}{kl[1]:12.6f}{same[0]:15}{same[1]:9}")
        rows.append({"name": one.name, "perplexity": loss.perplexity, "divergence": kl, "said_as": same})
    print(json.dumps({"model": a.model.name, "layers": a.layers, "precision": a.precision, "tokens": len(ids), "rows": rows}))


if __name__ == "__main__":
    main()
