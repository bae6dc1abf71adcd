"""/v1/systemone: probabilities of allowed answers, read from logits."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import otaro
from otaro.serve.decisions import Decision, Question, answered, margin

STATE = "The statement is a list of names."
QUESTIONS = {
    "kind": {
        "type": "choice",
        "instructions": "What is it?",
        "criteria": {"list": "many", "name": None, "call": {"a": [1]}},
    },
    "good": {"type": "score", "criteria": ["bad", "middling", "good"]},
    "true": {"type": "noul", "instructions": "Is it true?", "criteria": {"true": "it is"}},
}
WORDED = {
    "kind": 'What is it?\nA) list: many\nB) name\nC) call: {"a": [1]}\nReply with one letter, A to C.',
    "good": "A) bad\nB) middling\nC) good\nReply with one letter, A to C.",
    "true": "Is it true?\nYes means: it is\nReply with Yes or No.",
}


@pytest.fixture
def tokens(tiny, monkeypatch):
    """The built-in vocabulary is small: its Yes and No are other words."""
    plain = tiny.service.tokenizer

    class Tokenizer:
        chat_template = plain.chat_template
        apply_chat_template = staticmethod(plain.apply_chat_template)

        def __call__(self, text, **options):
            return plain({"Yes": "T", "No": "F"}.get(text, text), **options)

    monkeypatch.setattr(tiny.service, "tokenizer", Tokenizer())
    return lambda labels: [plain(one, add_special_tokens=False)["input_ids"][0] for one in labels]


def ask(running, questions=QUESTIONS, **more):
    return running.post("/v1/systemone", {"model": "tiny", "state": STATE, "questions": questions, **more})


@pytest.mark.parametrize("precision", ["E5M8", "E5M3"])
def test_probabilities_are_those_of_the_logits(tiny, tokens, model, precision):
    response = ask(tiny, precision=precision).json()
    with otaro.Engine(model, max_sequences=1) as engine:
        for name, labels in {"kind": "ABC", "good": "ABC", "true": "TF"}.items():
            prompt = f"user: {STATE}\n\n{WORDED[name]}\nassistant:"
            (token,) = engine.submit(
                prompt, precision=precision, max_new_tokens=1, logprobs=model.config.vocab_size
            )
            logits = torch.tensor([dict(token.top)[label] for label in tokens(labels)], dtype=torch.float64)
            answer = response["answers"][name]
            found = (
                list(answer["probabilities"].values())
                if name != "true"
                else [answer["noul"], 1 - answer["noul"]]
            )
            assert found == pytest.approx(logits.softmax(0).tolist(), rel=1e-12)  # both in float64
            assert answer["precision"] == precision
    assert response["precision"] == precision
    assert response["usage"]["output_tokens"] == 0
    assert response["usage"]["input_tokens"] > 60


def test_an_answer_by_its_text_is_as_likely_as_its_tokens_one_after_the_other(tiny, model):
    words = {"a": "returns a list", "b": "is a string", "returns": None}
    question = {"type": "choice", "by": "text", "instructions": "What does it do?", "criteria": words}
    found = ask(tiny, {"q": question}, precision="E5M4").json()["answers"]["q"]["probabilities"]
    ids = tiny.service.tokenizer(f"user: {STATE}\n\nWhat does it do?\nassistant:")["input_ids"]
    totals = []
    with otaro.Engine(model, max_sequences=1) as engine:
        for text in ("returns a list", "is a string", "returns"):
            answer, total = tiny.service.tokenizer(text, add_special_tokens=False)["input_ids"], 0.0
            for at, token in enumerate(answer):
                (step,) = engine.submit(
                    [*ids, *answer[:at]], precision="E5M4", max_new_tokens=1, logprobs=model.config.vocab_size
                )
                total += dict(step.top)[token]
            totals.append(total)
    assert list(found.values()) == pytest.approx(
        torch.tensor(totals, dtype=torch.float64).softmax(0).tolist(), rel=1e-12
    )


def test_questions_about_one_state_share_it(tiny, tokens):
    response = ask(tiny, {f"q{number}": QUESTIONS["good"] for number in range(4)}, precision="E5M6").json()
    answers = [answer["probabilities"] for answer in response["answers"].values()]
    assert all(answer == answers[0] for answer in answers)
    reused = tiny.metric('otaro_reused_tokens_total{precision="E5M6"}')
    # three of the four found all but their last token
    assert reused > 0.6 * response["usage"]["input_tokens"]


def test_the_example_of_the_page_is_answered_in_the_shape_that_it_shows(tiny, tokens):
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    body = json.loads(re.search(r"/v1/systemone [^\n]*-d '(\{.*?\})'\n", page, re.DOTALL)[1])
    shown = json.loads(
        "{"
        + re.search(r'^    ("urgent": \{"type": "score", "score".*?)\n\n', page, re.DOTALL | re.MULTILINE)[1]
        + "}"
    )
    answers = tiny.post("/v1/systemone", body).json()["answers"]
    assert {name: one["type"] for name, one in answers.items()} == {
        "team": "choice",
        "urgent": "score",
        "angry": "noul",
    }
    assert answers["urgent"].keys() == shown["urgent"].keys()
    levels = body["questions"]["urgent"]["criteria"]
    assert (
        answers["urgent"]["legend"]
        == shown["urgent"]["legend"]
        == {str(n): level for n, level in enumerate(levels)}
    )
    chances = list(shown["urgent"]["probabilities"].values())
    question = Question("urgent", "score", "", list("012"), levels)
    assert answered(question, Decision(1, otaro.Precision("E5M3"), chances)) == shown["urgent"]


def test_answers_have_the_shape_of_their_kind():
    choice = Question("q", "choice", "", ["a", "b"], [])
    even = Decision(1, otaro.Precision("E5M3"), [0.75, 0.25])
    assert answered(choice, even) == {
        "type": "choice",
        "choice": "a",
        "probabilities": {"a": 0.75, "b": 0.25},
        "confidence": 0.5,
        "precision": "E5M3",
    }
    score = answered(
        Question("q", "score", "", ["0", "1", "2"], ["bad", {"x": 1}, "good"]),
        Decision(1, even.precision, [0, 0.5, 0.5]),
    )
    assert (score["score"], score["legend"]) == (1.5, {"0": "bad", "1": {"x": 1}, "2": "good"})
    assert score["confidence"] == pytest.approx(1 - 0.5 / (2 / 3))
    sure = answered(Question("q", "score", "", ["0"], ["only"]), Decision(1, even.precision, [1.0]))
    assert sure["confidence"] == 1
    assert answered(Question("q", "noul", "", ["true", "false"], []), even) == {
        "type": "noul",
        "noul": 0.75,
        "precision": "E5M3",
    }
    assert margin([0.2, 0.5, 0.3]) == pytest.approx(0.2)
    assert margin([1.0]) == 1


def test_auto_asks_again_only_where_the_margin_is_small(start):
    questions = {
        "kind": QUESTIONS["kind"],
        "good": QUESTIONS["good"],
        "other": {"type": "score", "criteria": ["x", "y"]},
    }
    never, always = start(auto_margin=0.0), start(auto_margin=1.0)
    coarse, fine = (ask(never, questions, precision=one).json()["answers"] for one in ("E5M3", "E5M8"))
    margins = sorted(margin(answer["probabilities"].values()) for answer in coarse.values())
    assert margins[0] < margins[1]
    some = start(auto_margin=(margins[0] + margins[1]) / 2)
    for running, escalated in ((never, 0), (always, 3), (some, 1)):
        response = ask(running, questions, precision="auto")
        answers = response.json()["answers"]
        asked_again = [name for name, answer in answers.items() if answer["precision"] == "E5M8"]
        assert len(asked_again) == escalated
        assert answers == {name: (fine if name in asked_again else coarse)[name] for name in answers}
        assert running.metric("otaro_escalated_decisions_total") == escalated
        told = {0: "E5M3", 1: "E5M3, E5M8", 3: "E5M8"}[escalated]
        assert response.headers["x-otaro-precision"] == told
    assert ask(some, questions, model="tiny:auto").json()["precision"] == "E5M3, E5M8"


def test_a_model_without_a_template_goes_on_with_the_text(tiny, monkeypatch):
    monkeypatch.setattr(tiny.service.tokenizer, "chat_template", None)
    response = ask(tiny, {"kind": QUESTIONS["kind"]})
    assert response.status_code == 200
    assert math.isclose(sum(response.json()["answers"]["kind"]["probabilities"].values()), 1)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": {"q": {"type": "essay", "criteria": {}}}}, "questions.q.type"),
        ({"questions": {"q": {"type": "foo"}}}, "questions.q.type"),
        ({"questions": {"q": {"type": ["choice"], "by": "letters"}}}, "questions.q.type"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "choice"}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": ["x"] * 27}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": [1]}}}, "questions.q.criteria[0]"),
        ({"questions": {"q": {"type": "noul", "criteria": {"maybe": "x"}}}}, "questions.q.criteria.maybe"),
        ({"questions": {"q": {"type": "noul", "more": 1}}}, "questions.q.more"),
        ({"questions": {"q": {"type": "noul", "by": "text"}}}, "questions.q.by"),
        ({"questions": {"q": {"type": "score", "by": "text", "criteria": ["a", ""]}}}, "questions.q"),
        ({"questions": {"q": {"type": "score", "by": "text", "criteria": ["word " * 600]}}}, "questions.q"),
        ({"state": None}, "state"),
        ({"state": 3}, "state"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"precision": "E5M9"}, "precision"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_wrong_field_is_named(tiny, change, param):
    response = ask(tiny, **{"questions": {"q": QUESTIONS["good"]}, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_labels_that_are_no_tokens_are_refused(tiny):
    """The small vocabulary of the built-in model has no single tokens for Yes and No."""
    response = ask(tiny, {"q": QUESTIONS["true"]})
    assert response.status_code == 400
    assert "no single tokens for Yes, No" in response.json()["error"]["message"]
