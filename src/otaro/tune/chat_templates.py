"""Chat templates for models that come without one: three built-in ones, or a Jinja file.

A base model has no template, and conversations cannot be tuned on without. The one that is given is kept with
the tuned tokenizer, so that `otaro chat`, and transformers, speak to the model as it was tuned.

A template that fits a model says three things with tokens the model has: where a text begins (if the
tokenizer begins texts so), who speaks, and where an answer ends. The built-in ones, in templates/, do:

    alpaca   ### Instruction: and ### Response:, after the opening sentence of Alpaca's prompts; a model tuned
             on instruction rows is thereby asked in exactly the words it was tuned on
    vicuna   USER: and ASSISTANT:
    chatml   <|im_start|>user and <|im_end|>; only for vocabularies with both, such as Qwen's and SmolLM2's

The first two end an answer with the end-of-text token.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from otaro.errors import OtaroError
from otaro.tokens import begins_with_bos

BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
_TRIAL = [{"role": "user", "content": "7 times 8?"}, {"role": "assistant", "content": "It is 56."}]
_MARK = re.compile(r"<\|[^<>|\s]+\|>|</?[a-z]+(?:_[a-z]+)+>")  # looks like a token: <|im_end|>, <end_of_turn>


class TemplateError(OtaroError, ValueError):
    """A chat template that cannot be used with a model."""


def use_template(template: str, tokenizer: Any, generation: Any) -> list[str]:
    """Give a tokenizer a built-in template, or that of a file; returns what the user should know of it.

    The token that ends an answer joins those that end a generation, in the model's `generation` config.
    """
    called, beginning = f"--chat-template {template}", begins_with_bos(tokenizer)
    tokenizer.chat_template = _read(template)
    if template in BUILT_IN:
        if tokenizer.eos_token is None:
            raise TemplateError(f"{called} needs an end-of-text token, which this tokenizer lacks")
        if beginning is not None:
            tokenizer.chat_template = "{{- bos_token -}}\n" + tokenizer.chat_template
    try:
        whole = tokenizer.apply_chat_template(_TRIAL, tokenize=False)
        prompt = tokenizer.apply_chat_template(_TRIAL[:1], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it fails in whatever way it likes
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TemplateError(f"{called}{line} cannot be rendered: {error}") from error
    if not all(message["content"] in whole for message in _TRIAL):
        raise TemplateError(f"{called} leaves out what user or assistant say; it has to write all `messages`")
    remarks, vocabulary, marks = [], tokenizer.get_vocab(), dict.fromkeys(_MARK.findall(whole + prompt))
    if lacking := ", ".join(mark for mark in marks if mark not in vocabulary):
        if template in BUILT_IN:
            others = " or ".join(name for name in BUILT_IN if name != template)
            raise TemplateError(f"{called} needs {lacking}, which the vocabulary lacks; take {others}")
        remarks.append(f"{called}: the vocabulary of this model lacks {lacking}, to be read as plain text")
    if beginning is not None and tokenizer(whole, add_special_tokens=False)["input_ids"][:1] != [beginning]:
        remarks.append(f"{called}: this model expects {tokenizer.bos_token} first: {{{{ bos_token }}}}")
    if (end := _end_of_answer(whole, tokenizer)) is None:
        remarks.append(f"{called}: no token tells where an answer ends; write {{{{ eos_token }}}} there")
    else:
        _stop_at(end, generation)
    return remarks


def _read(template: str) -> str:
    try:
        return BUILT_IN.get(template, Path(template)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"is not built in ({', '.join(BUILT_IN)}) and cannot be read as a file"
        raise TemplateError(f"--chat-template {template} {problem}: {error}") from error


def _end_of_answer(whole: str, tokenizer: Any) -> int | None:
    """The token that closes the last turn of a conversation."""
    closing = whole.rpartition(_TRIAL[-1]["content"])[2]
    rest: list[int] = tokenizer(closing, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return next((token for token in rest if token in special), None)


def _stop_at(end: int, generation: Any) -> None:
    stops = generation.eos_token_id
    known = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    if end not in known:
        generation.eos_token_id = [*known, end]
