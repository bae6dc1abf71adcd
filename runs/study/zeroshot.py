"""Zero-shot tasks without the harness at hand: its requests are written once, and scored elsewhere.

`export` asks lm-evaluation-harness for everything that its tasks would ask a model: the tokens of each
context and answer, which answer is right, and by which lengths likelihoods are divided. `evaluate` needs
nothing but that and a model. The result is the harness's own, to the last sample; a test compares the two.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

TOKENS_AT_ONCE = {"cuda": 32_768, "cpu": 2_048}
LIMIT = 500  # documents of a task


@dataclass(frozen=True)
class Question:
    """One document of a task."""

    choices: list[tuple[list[int], list[int]]]  # token ids of context and answer
    gold: int  # which is right
    lengths: list[float]  # what scores are divided by


Questions = dict[str, list[Question]]


def export(names: Sequence[str], data_dir: Path, tokenizer: Any, model: Any) -> Questions:
    """The questions of the harness's tasks; `model` is any, for the harness wants one to tokenise."""
    from otaro.evaluate.harness import Tasks, _quiet

    tasks = Tasks(names, data_dir)
    found: Questions = {}
    for name in tasks.names:
        (task,) = tasks.prepare(name)["tasks"].values()
        with _quiet():
            runner = import_module("lm_eval.models.huggingface").HFLM(pretrained=model, tokenizer=tokenizer)
            task.build_all_requests(limit=LIMIT, rank=0, world_size=1)
        by_norm = "acc_norm" in task.aggregation()
        by_document: dict[int, list[Any]] = {}
        for instance in task.instances:
            by_document.setdefault(instance.doc_id, []).append(instance)
        found[name] = [_question(task, instances, runner, by_norm) for instances in by_document.values()]
    return found


def _question(task: Any, instances: list[Any], runner: Any, by_norm: bool) -> Question:
    instances = sorted(instances, key=lambda instance: instance.idx)
    count, document = len(instances), instances[0].doc
    # Which answer counts as right, by what the task itself makes of likelihoods that favour each in turn.
    likelihoods = [[(0.0 if i == j else -1e9, False) for j in range(count)] for i in range(count)]
    right = [task.process_results(document, favouring)["acc"] for favouring in likelihoods]
    lengths = [float(len(choice)) for choice in task.doc_to_choice(document)] if by_norm else [1.0] * count
    pairs: Any = [runner._encode_pair(*instance.args) for instance in instances]
    return Question(pairs, right.index(1.0), lengths)


def save(questions: Questions, path: Path) -> None:
    content = {name: [[q.choices, q.gold, q.lengths] for q in some] for name, some in questions.items()}
    path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


def load(path: Path) -> Questions:
    content = json.loads(gzip.decompress(path.read_bytes()))
    return {name: [Question(*question) for question in some] for name, some in content.items()}


@torch.inference_mode()
def log_likelihoods(model: Any, questions: Sequence[Question], positions: int) -> list[list[float]]:
    """The log probability of every choice after its context, which loses its beginning if it does not fit."""
    every = enumerate(question.choices for question in questions)
    requests = [(q, c, *choice) for q, choices in every for c, choice in enumerate(choices)]
    inputs = [(context + answer)[-(positions + 1) :][:-1] for _, _, context, answer in requests]
    order = sorted(range(len(requests)), key=lambda i: -len(inputs[i]))
    found = [[0.0] * len(question.choices) for question in questions]
    budget, at = TOKENS_AT_ONCE[model.device.type], 0
    while at < len(order):
        width = len(inputs[order[at]])
        members = order[at : at + max(1, budget // width)]
        at += len(members)
        ids = torch.zeros(len(members), width, dtype=torch.long)
        asked: list[tuple[int, int, int]] = []  # row, column, token
        for row, i in enumerate(members):
            ids[row, : len(inputs[i])] = torch.tensor(inputs[i])
            first = len(inputs[i]) - len(requests[i][3])
            asked += ((row, column, token) for column, token in enumerate(requests[i][3], first))
        # What is padded comes after everything that counts, so a causal model never looks at it. And the
        # head, the largest part of a small model, is needed at the answers alone.
        hidden = model.model(ids.to(model.device), use_cache=False).last_hidden_state
        rows, columns, tokens = torch.tensor(asked, device=model.device).T
        logits = model.lm_head(hidden[rows, columns]).float()
        scores = torch.zeros(len(members), dtype=torch.float64, device=model.device)
        scores.index_add_(0, rows, (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)).double())
        for i, score in zip(members, scores.tolist(), strict=True):
            found[requests[i][0]][requests[i][1]] = score
    return found


def accuracy(questions: Sequence[Question], scores: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """The share of right answers and its standard error, as the harness computes them."""
    right = 0
    for question, likelihoods in zip(questions, scores, strict=True):
        each = [score / length for score, length in zip(likelihoods, question.lengths, strict=True)]
        right += each.index(max(each)) == question.gold
    count = len(questions)
    share = right / count
    return share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None


def evaluate(model: Any, questions: Questions, positions: int) -> dict[str, list[float | None]]:
    """Accuracy and standard error of every task."""
    every = [question for some in questions.values() for question in some]  # at once: fuller batches
    scores, found = iter(log_likelihoods(model, every, positions)), {}
    for name, some in questions.items():
        share, error = accuracy(some, [next(scores) for _ in some])
        found[name] = [round(share, 5), None if error is None else round(error, 5)]
    return found
