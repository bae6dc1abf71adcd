"""The built-in default model: a language model small enough to ship inside the package, and the text behind
it.

The model is a LLaMA (the same architecture as the large ones, some 1.4 million parameters, its own tokenizer
of 1536 tokens) in the ordinary Hugging Face layout under `MODEL_DIR`. It was trained from scratch on text
which every Python installation carries, so nobody has to download or license a corpus: this module reads that
text from the running Python, and no text is stored in the package.

Three kinds of text exist. *Topics* are the language reference in prose, as ``help("assert")`` prints it
(`pydoc_data.topics`). *Docstrings* and *source* come from the standard library's own ``.py`` files, which are
parsed and never imported; they add bulk, since the topics alone would be learnt by heart.

The split is by topic. A hash of the topic's name, which does not depend on machine, run or Python version,
puts about 10% of the topics (by size) into the held-out text and some 4% into the validation text, which
training uses to pick its best moment. Topics quote each other, though: a section on its own is often part of
a larger topic too. So every paragraph that has a run of `RUN_OF_WORDS` words in common with the held-out or
validation text is dropped from all training text, docstrings and source included. What is held out has then
never been trained on, for the Python that trained the model (3.11); another version of Python words some
topics differently, which moves perplexities a little.

To train the model again, see ``runs/train_builtin.py``: it prepares this text, trains, and writes
`MODEL_DIR`'s files.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from otaro.errors import OtaroError

__all__ = [
    "MODEL_DIR",
    "TextUnavailableError",
    "docstring_documents",
    "heldout_text",
    "source_documents",
    "topic_documents",
    "topics_training_text",
]

MODEL_DIR = Path(__file__).parent / "model"

RUN_OF_WORDS = 8  # long enough that two texts share it by quoting, hardly ever by chance
SHORTEST_QUOTE = 4  # a shorter paragraph ("For example:") belongs to everybody

# The salt is one of a few for which both shares come out near their aim and no single topic makes up most of
# either.
SPLIT_SALT = "otaro-2008"
HELDOUT_BELOW, VALIDATION_BELOW = 26, 39  # of 256

# Tests and vendored code are no documentation, encodings are tables of numbers, and pydoc_data is the topics
# again.
SKIPPED_DIRECTORIES = {
    *("test", "tests", "idlelib", "ensurepip", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # what this one machine was built with
SMALLEST_DOCUMENT = 200  # characters; less is an empty package or a re-export


class TextUnavailableError(OtaroError):
    """The Python installation lacks the text which the built-in model is trained and measured on."""


def heldout_text() -> str:
    """The topics the built-in model has never seen: what its perplexity is to be measured on."""
    return _joined(topic_documents("heldout"))


def topics_training_text() -> str:
    """The topics in the training text: some 300 kilobytes of prose, enough for a short fine-tuning."""
    return _joined(topic_documents("training"))


def topic_documents(part: str) -> list[str]:
    """The topics of one `part` ("training", "validation" or "heldout"), sorted by name.

    Held-out topics are whole. The others lose what they share with the parts before them in the order
    held-out, validation, training; a training topic also loses what an earlier training topic said in the
    same words.
    """
    documents = [text for name, text in sorted(_topics().items()) if _part_of(name) == part]
    if part == "heldout":
        return documents
    if part == "validation":
        return _without_quotes(documents, _runs(topic_documents("heldout")))
    said: set[str] = set()
    once = []
    for document in _without_quotes(documents, _unseen_runs()):
        fresh = [paragraph for paragraph in _paragraphs(document) if paragraph not in said]
        said.update(fresh)
        once.append("\n\n".join(fresh))
    return _worthwhile(once)


def docstring_documents() -> list[str]:
    """All docstrings of the standard library, one document for each module."""
    import ast  # here, as it takes longer to load than the rest of this module

    documented = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)
    documents = []
    for source in _sources():
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
        documents.append("\n\n".join(filter(None, map(ast.get_docstring, nodes))))
    return _without_quotes(documents, _unseen_runs())


def source_documents() -> list[str]:
    """The standard library's source files, one document for each."""
    return _without_quotes(_sources(), _unseen_runs())


def _part_of(topic: str) -> str:
    bucket = hashlib.sha256(f"{SPLIT_SALT}:{topic}".encode()).digest()[0]
    return "heldout" if bucket < HELDOUT_BELOW else "validation" if bucket < VALIDATION_BELOW else "training"


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextUnavailableError(
            "this Python has no pydoc_data.topics (the text behind help('assert')), which the built-in "
            "model is "
            "measured on; some stripped-down installations leave it out: use a full Python, or give your "
            "own text"
        ) from error
    return topics


@functools.cache
def _sources() -> tuple[str, ...]:
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        path.read_text("utf-8", "replace") for path in sorted(root.rglob("*.py")) if _is_wanted(path, root)
    ]
    if not texts:
        raise TextUnavailableError("this Python carries no .py files of its standard library to train on")
    return tuple(texts)


def _is_wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return SKIPPED_DIRECTORIES.isdisjoint(parts) and not any(
        part.startswith(SKIPPED_PREFIXES) for part in parts
    )


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if paragraph.strip()]


def _runs_of(paragraph: str) -> Iterator[str]:
    """Every run of words, so that breaks and punctuation hide no quotation; short paragraphs whole."""
    words = re.findall(r"\w+", paragraph.lower())
    if SHORTEST_QUOTE <= len(words) < RUN_OF_WORDS:
        yield " ".join(words)
    for start in range(len(words) - RUN_OF_WORDS + 1):
        yield " ".join(words[start : start + RUN_OF_WORDS])


def _runs(documents: Collection[str]) -> frozenset[str]:
    return frozenset(
        run for text in documents for paragraph in _paragraphs(text) for run in _runs_of(paragraph)
    )


@functools.cache
def _unseen_runs() -> frozenset[str]:
    return _runs(topic_documents("heldout")) | _runs(topic_documents("validation"))


def _without_quotes(documents: Collection[str], quoted: frozenset[str]) -> list[str]:
    """The documents without the paragraphs that quote; documents of which too little remains are left out."""
    return _worthwhile(
        [
            "\n\n".join(
                paragraph for paragraph in _paragraphs(text) if quoted.isdisjoint(_runs_of(paragraph))
            )
            for text in documents
        ]
    )


def _worthwhile(documents: list[str]) -> list[str]:
    return [document for document in documents if len(document) >= SMALLEST_DOCUMENT]


def _joined(documents: list[str]) -> str:
    return "\n\n".join(document.strip("\n") for document in documents) + "\n"
