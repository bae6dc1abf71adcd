"""One row of the tuning table: tune a model by one method, then its perplexity on other text at all six precisions.

    runs/get_smollm2.sh
    python runs/tune_table.py models/SmolLM2-135M --train valid.txt --test test.txt --method uniform --distill 0.5 --name best

Prints one line of JSON; rows are independent, so several processes can share one GPU. `--method none` measures without tuning.
Embedding and head are quantised like everything else, at every precision.
"""

import argparse
import json
import tempfile
import time
from math import exp
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments
from transformers.utils import logging

import otaro
from otaro.tune.config import Options
from otaro.tune.data import collate, load_data, padding_id
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.trainer import OtaroTrainer, losses_by_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="text to tune on")
    parser.add_argument("--test", type=Path, required=True, help="text to measure on")
    parser.add_argument("--test-tokens", type=int, default=147_456)
    parser.add_argument("--name", help="what to call the row (default: the method)")
    parser.add_argument("--method", default="uniform", help="none, fp, uniform, bps, otaro, fixed:E5M4, ...")
    parser.add_argument("--reconstruction", default="midpoint")
    parser.add_argument("--distill", type=float, default=0.0)
    parser.add_argument("--weights", type=float, nargs=6, default=None, help="of the six precisions, finest first")
    parser.add_argument("--accumulate", default="sum")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(a.device)
    started = time.perf_counter()
    if a.method == "none":
        precisely = Precisely(reconstruction=a.reconstruction)
        prepare(model, precisely)
    else:
        weights = tuple(a.weights) if a.weights else None
        common = {"reconstruction": a.reconstruction, "distill": a.distill, "weights": weights, "accumulate": a.accumulate}
        with tempfile.TemporaryDirectory() as scratch:
            arguments = TrainingArguments(
                scratch, per_device_train_batch_size=8, max_steps=a.steps, learning_rate=a.lr, lr_scheduler_type="cosine",
                optim="sgd" if a.optimizer == "sgd" else "adamw_torch", bf16=a.device != "cpu", seed=a.seed, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            )  # fmt: skip
            trainer = OtaroTrainer(
                model=model,
                args=arguments,
                train_dataset=load_data(a.train, tokenizer, 512),
                data_collator=collate(padding_id(tokenizer)),
                otaro=Options(method=a.method, **common),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        precisely = trainer.precisely
    seconds = time.perf_counter() - started

    test = load_data(a.test, tokenizer, 2048)
    examples = [test[i] for i in range(min(len(test), a.test_tokens // 2048))]
    batches = [collate(padding_id(tokenizer))(examples[i : i + 4]) for i in range(0, len(examples), 4)]
    losses = losses_by_precision(model, precisely, [None, *otaro.PRECISIONS], batches)
    names = ["full", *map(str, otaro.PRECISIONS)]
    row = {name: round(exp(loss), 3) for name, loss in zip(names, losses, strict=True)}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(a).items()}
    print(json.dumps({"row": a.name or a.method, "perplexity": row, "seconds": round(seconds, 1), "settings": settings}))


if __name__ == "__main__":
    main()
