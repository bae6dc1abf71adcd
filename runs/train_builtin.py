"""Trains the built-in model, the small LLaMA under ``src/otaro/builtin/model``, from scratch.

It goes in two steps, since the machine with the GPU need not be the one whose Python supplies the text:

    python runs/train_builtin.py --prepare models/builtin-corpus
    python runs/train_builtin.py --corpus models/builtin-corpus --out src/otaro/builtin/model

*Preparing* reads the text (see `otaro.builtin` for what it is and how it is split), trains a byte-level BPE
tokenizer on its training part, and writes one ``.bin`` file of uint16 tokens for each kind of text; each
document stands between <s> and </s>. *Training* needs that directory only. It strings the training kinds
together, each as often as `MIX` says (the documentation is what the model is for, the code is there for
bulk), and cuts its windows at random places.

The validation topics decide which moment of the training is kept. The held-out topics are read once, at the
very end, on the float16 weights as saved, so that their perplexity is an honest one.
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CONTEXT = 512
VOCABULARY = 1536
STEPS, BATCH = 4800, 16
DECAY = 1.0  # on matrices, not on norms; high, as the text is short
MIX = {"topics": 4, "docstrings": 2, "source": 1}
"""How often each kind of text occurs in what is trained on."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train otaro's built-in model.")
    step = parser.add_mutually_exclusive_group(required=True)
    prepares = "write tokenizer and tokens to DIR, train nothing"
    step.add_argument("--prepare", type=Path, metavar="DIR", help=prepares)
    step.add_argument("--corpus", type=Path, metavar="DIR", help="train on what --prepare wrote to DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the trained model goes")
    arguments = parser.parse_args()
    if arguments.corpus and not arguments.out:
        parser.error("--corpus needs --out")
    if arguments.prepare:
        prepare(arguments.prepare)
    else:
        train(arguments.corpus, arguments.out)


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
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # which every version of transformers knows
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    sizes = {}
    for kind, documents in kinds.items():
        encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        assert tokenizer.batch_decode(encoded) == documents, f"the tokenizer does not give {kind} back"
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        stream = [token for ids in encoded for token in (begin, *ids, end)]
        np.array(stream, dtype=np.uint16).tofile(directory / f"{kind}.bin")
        sizes[kind] = {"tokens": len(stream), "bytes": sum(len(document.encode()) for document in documents)}
        print(f"{kind}: {len(documents)} documents, {sizes[kind]['bytes']} bytes, {len(stream)} tokens")
    (directory / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")


def train_tokenizer(prose: list[str]) -> Any:
    """A tokenizer for prose that encodes anything: its smallest tokens are the 256 bytes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [BOS, EOS, PAD]
    how: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(prose, trainers.BpeTrainer(vocab_size=VOCABULARY, **how))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names, model_max_length=CONTEXT)


# ---- Training


def train(corpus: Path, out: Path) -> None:
    """Sizes are multiples of 128 so that weights divide into quantization groups; 2.8 MB as float16."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(corpus)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, **special,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    stream = torch.cat([tokens_of(kind, corpus).repeat(times) for kind, times in MIX.items()])
    starts = torch.randint(len(stream) - CONTEXT, (STEPS * BATCH,)).tolist()
    validation = tokens_of("validation", corpus)
    print(f"{model.num_parameters()} parameters, {len(stream)} tokens an epoch", flush=True)
    often = STEPS // 25
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model,
            TrainingArguments(
                scratch, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, seed=0,
                weight_decay=DECAY, adam_beta2=0.95, warmup_steps=100, bf16=torch.cuda.is_available(),
                lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.02},
                eval_strategy="steps", eval_steps=often, save_steps=often, save_total_limit=1,
                logging_steps=often, load_best_model_at_end=True, metric_for_best_model="loss",
                report_to=[], disable_tqdm=True,
            ),
            train_dataset=windows(stream, starts),
            eval_dataset=windows(validation, range(0, len(validation) - CONTEXT, CONTEXT)),
        )  # fmt: skip
        trainer.train()
        print(f"kept: validation perplexity {math.exp(trainer.evaluate()['eval_loss']):.3f}")
    model.half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner only, but is to be shipped
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus / name, out / name)
    saved: Any = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    report_heldout(saved, corpus)
    inputs = tokenizer("The statement", return_tensors="pt", return_token_type_ids=False)
    written = saved.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.7, top_k=40)
    print("sample:", tokenizer.decode(written[0]))


def tokens_of(kind: str, corpus: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(corpus / f"{kind}.bin", dtype=np.uint16).astype(np.int64))


def windows(tokens: torch.Tensor, starts: Iterable[int]) -> list[dict[str, torch.Tensor]]:
    some = (tokens[start : start + CONTEXT] for start in starts)
    return [{"input_ids": one, "labels": one} for one in some]


@torch.no_grad()
def report_heldout(model: Any, corpus: Path) -> None:
    """Over consecutive windows; the rest that fills no window goes through on its own."""
    tokens, total = tokens_of("heldout", corpus), 0.0
    for start in range(0, len(tokens) - 1, CONTEXT):
        window = tokens[None, start : start + CONTEXT + 1]
        total += float(model(window, labels=window).loss) * (window.shape[1] - 1)
    size = json.loads((corpus / "sizes.json").read_text())["heldout"]["bytes"]
    perplexity, bits = math.exp(total / (len(tokens) - 1)), total / size / math.log(2)
    print(f"held-out perplexity {perplexity:.3f}, {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
