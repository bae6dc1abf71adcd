"""Fits behind the model's name and in the field `precision`; those made while it is served are found."""

import shutil

import pytest

import otaro
from otaro.file.fits import Fit, bytes_of, weights_of, write_fit
from otaro.file.io import NestedDirectory
from otaro.sefp.precision import Precision

ASK = {"prompt": "The file", "max_tokens": 12, "temperature": 0}
STATED = {
    "predicted": 0.1, "measured": 0.1, "uniform": "E5M3", "uniform_measured": 0.2, "text": "none",
    "text_sha256": "0" * 64, "command": "otaro fit", "date": "2026-11-16",
}  # fmt: skip


def made(nested, name, finest):
    names = list(nested.schema.packed)
    precisions = dict.fromkeys(names, Precision("E5M3")) | {names[0]: Precision(finest)}
    size = bytes_of(nested, precisions)
    fit = Fit(name, precisions, {"bytes": size, "bits_per_weight": 8 * size / weights_of(nested), **STATED})
    write_fit(nested, fit)
    return fit


@pytest.fixture(scope="module")
def directory(chat_dir, tmp_path_factory):
    return shutil.copytree(chat_dir, tmp_path_factory.mktemp("fits") / "tiny")


@pytest.fixture(scope="module")
def model(directory):
    made(NestedDirectory(directory), "800kB", "E5M6")
    return otaro.load(directory)


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_fit_answers_by_name_and_by_field(start, model):
    server = start()
    assert "tiny:fit:800kB" in [one.id for one in server.client.models.list()]
    assert server.http.get("/v1/models/tiny:fit:800kB").json()["id"] == "tiny:fit:800kB"
    named = server.post("/v1/completions", {**ASK, "model": "tiny:fit:800kB"})
    fielded = server.post("/v1/completions", {**ASK, "precision": "FIT:800.0 kb"})
    assert said(named) == said(fielded)
    assert named.headers["x-otaro-precision"] == named.json()["precision"] == "fit:800kB"
    with otaro.Engine(model) as engine:
        ids = engine.scheduler.tokenizer(ASK["prompt"])["input_ids"]
        assert said(named) == engine.submit(ids, precision="fit:800kB", max_new_tokens=12).text()
    phased = server.post("/v1/completions", {**ASK, "precision": {"prefill": "E5M8", "decode": "fit:800kB"}})
    assert phased.json()["precision"] == "E5M8, then fit:800kB"
    question = {"good": {"type": "score", "criteria": ["bad", "good"]}}
    decided = server.post(
        "/v1/systemone", {"precision": "fit:800kB", "state": "It rains.", "questions": question}
    )
    assert decided.json()["precision"] == "fit:800kB"


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"precision": "fit:9MB"}, 400, 'there is no fit "fit:9MB"; there are fit:800kB'),
        ({"precision": "fit:\x1b[2J"}, 400, "there is no fit"),
        ({"model": "tiny:fit:9MB"}, 404, 'there is no "tiny:fit:9MB"; there are tiny, tiny:auto'),
        ({"model": "tiny:fit:x"}, 404, 'there is no "tiny:fit:x"'),
        ({"model": "tiny:fit:800kB", "precision": "E5M4"}, 400, "the model's name says fit:800kB already"),
    ],
)
def test_other_fits_are_refused(start, body, status, why):
    answer = start().post("/v1/completions", {**ASK, **body})
    assert answer.status_code == status
    assert why in answer.json()["error"]["message"]


def test_fits_come_and_go_while_the_model_is_served(start, directory):
    server = start(precision="fit:800kB")
    assert server.post("/v1/completions", ASK).json()["precision"] == "fit:800kB"
    nested = NestedDirectory(directory)
    made(nested, "5bits", "E5M5")
    assert said(server.post("/v1/completions", {**ASK, "model": "tiny:fit:5bits"}))
    kept = (directory / "precisions.json").read_text()
    (directory / "precisions.json").write_text("damaged")
    try:
        assert not any("fit:" in one.id for one in server.client.models.list())
        assert server.post("/v1/completions", {**ASK, "precision": "fit:5bits"}).status_code == 400
        assert said(server.post("/v1/completions", {**ASK, "precision": "E5M8"}))
    finally:
        (directory / "precisions.json").write_text(kept)


def test_a_fit_that_is_not_there_is_no_default(start):
    with pytest.raises(otaro.OtaroError, match="has no fit:9MB"):
        start(precision="fit:9MB")
