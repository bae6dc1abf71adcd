"""Typed decisions, /v1/systemone: a probability for every allowed answer, read from the logits of one step.

The shapes are those of `transformers serve`. A request brings a state and questions about it; each is put to
the model in words that end where its answer begins, and each allowed answer has a label that is one token. No
text is written. Small models are poor at labels: a question with `"by": "text"`, which is ours, offers no
list, and asks how likely the model is to say what each answer stands for.

With precision auto a question is asked at the coarsest precision, and again at the finest only where the two
likeliest answers lie closer together than a margin.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from otaro.file.fits import Fit
from otaro.sefp.precision import Precision
from otaro.serve.errors import wrong
from otaro.serve.fields import Fields, checked_text, shown

_MAX_QUESTIONS = 64
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class Question:
    """One question, with its answers in the order of their labels."""

    name: str
    kind: str
    text: str
    """With the answers and their labels, to be put behind the state."""
    answers: list[str]
    """As the response names them."""
    legend: list[Any]
    """What the levels of a score stand for, as it was given."""
    texts: Sequence[str] = ()
    """What each answer says, where that is what is asked for."""

    @property
    def labels(self) -> Sequence[str]:
        """One for each answer."""
        return ["Yes", "No"] if self.kind == "noul" else _LETTERS[: len(self.answers)]

    @property
    def path(self) -> str:
        """Where it was in the request."""
        return f"questions.{self.name}"[:200]


@dataclass(frozen=True)
class Decisions:
    """What was asked for."""

    model: str | None
    precision: object
    state: str
    questions: list[Question]


@dataclass(frozen=True)
class Decision:
    """What the model makes of a question."""

    tokens: int
    """Of its prompt."""
    precision: Precision | Fit
    probabilities: list[float]
    """Of the answers, in their order."""


def decisions_ask(body: dict[str, Any]) -> Decisions:
    """POST /v1/systemone."""
    fields = Fields(body)
    model, precision = fields.text("model"), fields.take("precision")
    state, questions = _worded(fields.required("state"), "state"), fields.required("questions")
    if not isinstance(questions, dict) or not 0 < len(questions) <= _MAX_QUESTIONS:
        raise wrong("questions", f"give an object of 1 to {_MAX_QUESTIONS} questions")
    asked = [_question(checked_text(name, "questions"), value) for name, value in questions.items()]
    fields.only("images", [])
    fields.only("chat_template_kwargs", {})
    fields.end()
    return Decisions(model, precision, state, asked)


def _question(name: str, value: object) -> Question:
    fields = Fields(value, f"questions.{name}"[:200])
    kind, at = fields.required("type"), fields.path("criteria")
    if kind not in ("choice", "score", "noul"):
        raise wrong(fields.path("type"), f"give choice, score or noul, not {shown(kind)}")
    by = fields.take("by") or "label"
    if by not in ("label", "text") or (by == "text" and kind == "noul"):
        raise wrong(fields.path("by"), "give label, or for a choice or a score text")
    said: list[str] = []
    told = _worded(fields.take("instructions"), fields.path("instructions"))
    criteria: Any = fields.take("criteria") if kind == "noul" else fields.required("criteria")
    legend: list[Any] = []
    if kind == "choice":
        if not isinstance(criteria, dict) or not 0 < len(criteria) <= len(_LETTERS):
            raise wrong(at, f"give an object of 1 to {len(_LETTERS)} answers")
        answers = [checked_text(answer, at) for answer in criteria]
        means = [_worded(one, f"{at}.{answer}") for answer, one in criteria.items()]
        lines = [
            f"{answer}: {meant}" if meant else answer for answer, meant in zip(answers, means, strict=True)
        ]
        said = [meant or answer for answer, meant in zip(answers, means, strict=True)]
    elif kind == "score":
        if not isinstance(criteria, list) or not 0 < len(criteria) <= len(_LETTERS):
            raise wrong(at, f"give a list of 1 to {len(_LETTERS)} levels")
        answers, legend = [str(number) for number in range(len(criteria))], criteria
        said = lines = [_worded(one, f"{at}[{number}]") for number, one in enumerate(criteria)]
    else:
        inner = Fields(criteria or {}, at)
        means = [_worded(inner.take(answer), f"{at}.{answer}") for answer in ("true", "false")]
        inner.end()
        answers, lines = ["true", "false"], means
    fields.end()
    if by == "text":
        return Question(name, kind, told, answers, legend, said)
    if kind == "noul":
        lines = [f"{label} means: {line}" for label, line in zip(("Yes", "No"), lines, strict=True) if line]
        last = "Reply with Yes or No."
    else:
        lines = [f"{label}) {line}" for label, line in zip(_LETTERS, lines, strict=False)]
        last = f"Reply with one letter, A to {_LETTERS[len(lines) - 1]}."
    return Question(name, kind, "\n".join(line for line in (told, *lines, last) if line), answers, legend)


def _worded(value: object, at: str) -> str:
    """A text, or an object or a list as JSON."""
    if value is None or isinstance(value, str):
        return checked_text(value or "", at)
    if not isinstance(value, dict | list):
        raise wrong(at, f"give a text, an object or a list, not {shown(value)}")
    return checked_text(json.dumps(value, ensure_ascii=False), at)


def prompt_of(state: str, question: Question, tokenizer: Any) -> str | list[dict[str, str]]:
    """The question as the model is asked: as a message where it has a chat template, else a text to go on."""
    text = f"{state}\n\n{question.text}" if state else question.text
    return [{"role": "user", "content": text}] if tokenizer.chat_template else f"{text}\nAnswer:"


def answer_tokens(question: Question, tokenizer: Any) -> list[list[int]]:
    """The tokens of each answer as they follow the prompt: a message begins with them, a text has a space
    before.
    """
    spaces = ("", " ") if tokenizer.chat_template else (" ", "")
    if question.texts:
        found = [
            list(tokenizer(f"{spaces[0]}{text}", add_special_tokens=False)["input_ids"])
            for text in question.texts
        ]
        if not all(found):
            raise wrong(question.path, "one of its answers says nothing")
        return found
    for space in spaces:
        found = [
            list(tokenizer(f"{space}{label}", add_special_tokens=False)["input_ids"])
            for label in question.labels
        ]
        if all(len(ids) == 1 for ids in found) and len({ids[0] for ids in found}) == len(found):
            return found
    raise wrong(question.path, f"this model has no single tokens for {', '.join(question.labels)}")


def margin(probabilities: Sequence[float]) -> float:
    """How far the likeliest answer is ahead of the next."""
    first, *rest = sorted(probabilities, reverse=True)
    return first - rest[0] if rest else 1.0


def answered(question: Question, decision: Decision) -> dict[str, Any]:
    """The answer to a question, in the shape of its kind."""
    told: dict[str, Any] = {"type": question.kind}
    probabilities, precision = decision.probabilities, str(decision.precision)
    if question.kind == "noul":
        return {**told, "noul": probabilities[0], "precision": precision}
    by_answer = dict(zip(question.answers, probabilities, strict=True))
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    if question.kind == "choice":
        told["choice"] = question.answers[best]
    else:
        told["score"] = sum(level * one for level, one in enumerate(probabilities))
        told["legend"] = dict(zip(question.answers, question.legend, strict=True))
    confidence = _confidence(question.kind, probabilities, best)
    return {**told, "probabilities": by_answer, "confidence": confidence, "precision": precision}


def _confidence(kind: str, probabilities: Sequence[float], best: int) -> float:
    """0 where the model knows nothing, 1 where it is certain."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    if kind == "choice":
        return max(0.0, (probabilities[best] * count - 1) / (count - 1))
    expected = sum(one * abs(level - best) for level, one in enumerate(probabilities))
    ignorant = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - expected / ignorant)
