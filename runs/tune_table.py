"""The table of tuning methods: tune one model by each, then its perplexity on other text at every precision.

    runs/get_smollm2.sh
    python runs/tune_table.py models/SmolLM2-135M --train valid.txt --test test.txt --out rows.jsonl

Every row tunes the same weights on the same batches: 300 steps of 8 x 512 tokens, AdamW, cosine. Each gets the learning rate
that suits it: `best` its recipe's 1e-4, the others 5e-5, of which 1e-4 makes the dedicated `fixed:` models worse (docs/log.md).
A line of JSON per row goes to --out, and rows already there are not run again; `--rows` picks some, `--lr` and
`--options '{"distill": 0.6}'` make variants of them. Embedding and head are quantised like everything else. On a GPU steps are
compiled and computed in bfloat16; a row takes some 20 seconds on an H200.
"""

import argparse
import copy
import json
import tempfile
import time
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments
from transformers.utils import logging

import otaro
from otaro.sefp.precision import Precision
from otaro.tune.config import BEST, Options, Training, recipe
from otaro.tune.data import collate, load_data, padding_id
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.trainer import OtaroTrainer, losses_by_precision

ROWS: dict[str, Options | None] = {  # None: not tuned
    "none": None,
    "fp": Options(method="fp"),
    **{f"fixed:{p}": Options(method=f"fixed:{p}") for p in otaro.PRECISIONS},
    "bps": Options(method="bps"),
    "otaro": Options(method="otaro"),
    "otaro, mean": Options(method="otaro", accumulate="mean"),
    "uniform": Options(method="uniform"),
    "uniform, distill 0.5": Options(method="uniform", distill=0.5, distill_at=otaro.PRECISIONS),
    "best": BEST,
    "none, truncate": None,
    "fp, truncate": Options(method="fp", reconstruction="truncate"),
    "bps, truncate": Options(method="bps", reconstruction="truncate"),
    "otaro, truncate": Options(method="otaro", reconstruction="truncate"),
    "uniform, truncate": Options(method="uniform", reconstruction="truncate"),
}


def fields(text: str) -> dict[str, Any]:
    """Fields of Options from JSON."""
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
    of_precisions = {name: tuple(map(Precision, named[name])) for name in ("precisions", "distill_at") if name in named}
    return {**named, **of_precisions}


def tune(model: Any, a: argparse.Namespace, options: Options, lr: float, dataset: Any, padding: int) -> Precisely:
    """Tune the model in place."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, per_device_train_batch_size=8, max_steps=a.steps, learning_rate=lr, lr_scheduler_type="cosine",
            optim="adamw_torch_fused", bf16=a.device == "cuda", use_cpu=a.device == "cpu",
            seed=a.seed, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            remove_unused_columns=False, logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = OtaroTrainer(
            model=model, args=arguments, train_dataset=dataset, data_collator=collate(padding), otaro=options
        )
        if a.device == "cuda":
            trainer.compile_steps()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.precisely


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="text to tune on")
    parser.add_argument("--test", type=Path, required=True, help="text to measure on")
    parser.add_argument("--test-tokens", type=int, default=147_456)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file that rows are added to")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--options", type=fields, default={}, help="JSON: fields of Options that differ from the row's")
    parser.add_argument("--lr", type=float, help="of all rows, instead of each one's own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    original = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    dataset, test = load_data(a.train, tokenizer, 512), load_data(a.test, tokenizer, 2048)
    examples = [test[i] for i in range(min(len(test), a.test_tokens // 2048))]
    padding = padding_id(tokenizer)
    batches = [collate(padding)(examples[i : i + 4]) for i in range(0, len(examples), 4)]
    names = ["full", *map(str, otaro.PRECISIONS)]

    done = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    print(f"{'':24}" + "".join(f"{name:>9}" for name in names))
    for row in a.rows:
        options = replace(chosen, **a.options) if (chosen := ROWS[row]) else None
        lr = a.lr or (recipe("best")[1] if row == "best" else Training()).lr
        stated = {"model": a.model.name, "test_tokens": a.test_tokens, "lr": lr, "steps": a.steps, "seed": a.seed}
        settings = {**stated, "options": options.to_dict() if options else None}
        found = next((line for line in done if line["row"] == row and line["settings"] == settings), None)
        if found is None:
            started = time.perf_counter()
            model = copy.deepcopy(original).to(a.device)
            if options is None:
                precisely = Precisely(reconstruction="truncate" if "truncate" in row else "midpoint")
                prepare(model, precisely)
            else:
                precisely = tune(model, a, options, lr, dataset, padding)
            seconds = time.perf_counter() - started
            losses = losses_by_precision(model, precisely, [None, *otaro.PRECISIONS], batches)
            perplexity = {name: round(exp(loss), 3) for name, loss in zip(names, losses, strict=True)}
            found = {"row": row, "perplexity": perplexity, "seconds": round(seconds, 1), "settings": settings}
            with open(a.out, "a") as file:
                file.write(json.dumps(found) + "\n")
        print(f"{row:24}" + "".join(f"{found['perplexity'][name]:9.2f}" for name in names), flush=True)


if __name__ == "__main__":
    main()
