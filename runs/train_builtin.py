"""Trains the built-in model, the small LLaMA under ``src/otaro/builtin/model``, from scratch.

It goes in two steps, since the machine with the GPU need not be the one whose Python supplies the text:

    python runs/train_builtin.py --prepare models/builtin-corpus
    python runs/train_builtin.py --corpus models/builtin-corpus --out src/otaro/builtin/model --device cuda

*Preparing* reads the text (see `otaro.builtin` for what it is and how it is split), trains a byte-level BPE tokenizer
on its training part, and writes one ``.bin`` file of uint16 tokens for each kind of text; each document stands between
<s> and </s>. *Training* needs that directory only. It strings the training kinds together, each as often as `--mix`
says (the documentation is what the model is for, the code is there for bulk), and cuts its windows at random places.

The validation topics decide which moment of the training is kept. The held-out topics are read once, at the very end,
on the float16 weights as saved, so that their perplexity is an honest one.
"""

import argparse
import json
import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CONTEXT = 512
VOCABULARY = 1536
TRAINING_KINDS = ("topics", "docstrings", "source")

Model = Any  # a LlamaForCausalLM, whose methods carry no types that a checker could follow


def main() -> None:
    arguments = parse_arguments()
    if arguments.prepare:
        prepare(arguments.prepare)
    else:
        train(arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train otaro's built-in model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--prepare", type=Path, metavar="DIR", help="write tokenizer and tokens to DIR, train nothing")
    step.add_argument("--corpus", type=Path, metavar="DIR", help="train on what --prepare wrote to DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the trained model goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--seed", type=int, default=0, help="of weights and windows")
    parser.add_argument("--steps", type=int, default=4800, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {CONTEXT} tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=1.0, help="on matrices, not on norms; high, as the text is short")
    parser.add_argument(
        "--mix", type=int, nargs=3, default=(4, 2, 1), metavar="N", help=f"how often {', '.join(TRAINING_KINDS)} occur"
    )
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="shorten the schedule to end by then")
    parser.add_argument("--compile", action="store_true", help="use torch.compile: slow to start, faster steps")
    arguments = parser.parse_args()
    if arguments.corpus and not arguments.out:
        parser.error("--corpus needs --out")
    return arguments


# ---- Preparing


def prepare(directory: Path) -> None:
    from otaro import builtin  # here, so that the machine that trains needs no otaro

    kinds = {
        "topics": builtin.topic_documents("training"),
        "docstrings": builtin.docstring_documents(),
        "source": builtin.source_documents(),
        "validation": builtin.topic_documents("validation"),
        "heldout": builtin.topic_documents("heldout"),
    }
    # Weighed towards the topics, a token is 3% longer on them than it would be otherwise.
    tokenizer = train_tokenizer(kinds["topics"] * 4 + kinds["docstrings"])
    tokenizer.save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name which every version of transformers knows
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    sizes = {}
    for kind, documents in kinds.items():
        encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        assert tokenizer.batch_decode(encoded) == documents, f"the tokenizer does not give {kind} back"
        stream = [token for ids in encoded for token in (tokenizer.bos_token_id, *ids, tokenizer.eos_token_id)]
        np.array(stream, dtype=np.uint16).tofile(directory / f"{kind}.bin")
        sizes[kind] = {"tokens": len(stream), "bytes": sum(len(document.encode()) for document in documents)}
        print(f"{kind}: {len(documents)} documents, {sizes[kind]['bytes']} bytes, {len(stream)} tokens")
    (directory / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")


def train_tokenizer(prose: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for prose that encodes anything: its smallest tokens are the 256 bytes, so nothing is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        prose,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
        ),
    )
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


# ---- Training


def new_model(tokenizer: PreTrainedTokenizerFast) -> Model:
    """Sizes are multiples of 128 so that weights divide into quantization groups; 2.8 MB as float16."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    make: Any = LlamaForCausalLM
    return make(config)


def train(arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.corpus)
    model = new_model(tokenizer).to(device)
    stream = torch.cat(
        [tokens_of(kind, arguments.corpus).repeat(times) for kind, times in zip(TRAINING_KINDS, arguments.mix, strict=True)]
    ).to(device)
    validation = tokens_of("validation", arguments.corpus).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(stream)} tokens an epoch", flush=True)

    forward: Model = torch.compile(model) if arguments.compile else model
    optimizer = new_optimizer(model, arguments.lr, arguments.weight_decay)
    offsets = torch.arange(CONTEXT + 1, device=device)
    best_perplexity, best_weights = math.inf, model.state_dict()
    report_every = max(1, arguments.steps // 25)
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        # Whichever runs out first, steps or seconds, the learning rate has gone its whole way down by then.
        progress = max((step + 1) / arguments.steps, (time.monotonic() - started) / arguments.max_seconds)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * schedule(step, progress)
        starts = torch.randint(len(stream) - CONTEXT, (arguments.batch, 1), device=device)
        loss = next_token_loss(forward, stream[starts + offsets])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % report_every == 0 or progress >= 1:
            perplexity = math.exp(mean_loss(model, validation))
            if perplexity < best_perplexity:
                best_perplexity = perplexity
                best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            seconds = time.monotonic() - started
            print(f"{seconds:6.0f} s  step {step:5}  loss {loss.item():.4f}  validation {perplexity:.3f}", flush=True)

    model.load_state_dict(best_weights)
    save(model, arguments.corpus, arguments.out)
    saved: Model = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    saved.to(device)
    print(f"kept: validation perplexity {best_perplexity:.3f}")
    report_heldout(saved, arguments.corpus)
    print("sample:", sample(saved, tokenizer, "The statement"))


def tokens_of(kind: str, corpus: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(corpus / f"{kind}.bin", dtype=np.uint16).astype(np.int64))


def new_optimizer(model: Model, lr: float, weight_decay: float) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def schedule(step: int, progress: float, warmup: int = 100, floor: float = 0.02) -> float:
    """The share of the peak learning rate: a straight way up, then a cosine down to `floor`."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * cosine)


def next_token_loss(model: Model, windows: torch.Tensor) -> torch.Tensor:
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.autocast("cuda", torch.bfloat16) if windows.is_cuda else nullcontext():
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def mean_loss(model: Model, tokens: torch.Tensor) -> float:
    """Nats per token over consecutive windows; the rest that fills no window goes through on its own."""
    total = 0.0
    for start in range(0, len(tokens) - 1, CONTEXT):
        window = tokens[start : start + CONTEXT + 1]
        total += next_token_loss(model, window[None]).item() * (len(window) - 1)
    return total / (len(tokens) - 1)


def report_heldout(model: Model, corpus: Path) -> None:
    tokens = tokens_of("heldout", corpus).to(model.device)
    loss = mean_loss(model, tokens)
    size = json.loads((corpus / "sizes.json").read_text())["heldout"]["bytes"]
    bits = loss * (len(tokens) - 1) / size / math.log(2)
    print(f"held-out perplexity {math.exp(loss):.3f}, {bits:.3f} bits per byte")


def save(model: Model, corpus: Path, directory: Path) -> None:
    model.half().save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # it is written for its owner only, but is to be shipped
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus / name, directory / name)


def sample(model: Model, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    written = model.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.7, top_k=40)
    return str(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
