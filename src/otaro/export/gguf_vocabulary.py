"""A tokenizer as GGUF states it: tokens, their kinds, merges or scores, and which text is cut how before
merging.

llama.cpp knows two kinds that count here. "gpt2" is byte-level BPE: tokens and merges, and the name of a rule
by which text is cut first. Rules have no form in the file, so ours is looked up by what tokenizer.json says
of it, and refused if llama.cpp has none like it: text would be cut into other tokens in silence. "llama" is
SentencePiece's BPE: every token has a score, and the pair with the highest is merged first, so the order of
merges becomes scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otaro.errors import CheckpointError, OtaroError, brief
from otaro.file.gguf_tokenizer import BYTE, CONTROL, NORMAL, SPLITS, UNKNOWN, UNUSED, USER_DEFINED

_NO_SCORE = -1e4  # of what no merge makes

_SPLITS = {pattern: name for name, pattern in SPLITS.items()}


def vocabulary(directory: Path, rows: int) -> dict[str, Any]:
    """What to write, by names of gguf's writer; without tokens where the model has no tokenizer."""
    if not any(
        (directory / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return {"tokenizer_model": "none"}
    tokenizer = _tokenizer(directory)
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    model = stated["model"]
    if model.get("type") != "BPE":
        raise _refused(
            directory,
            f"it is {model.get('type')}, and llama.cpp gets byte-level BPE and SentencePiece's BPE here",
        )
    tokens, kinds = _tokens(stated, tokenizer, rows, directory)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    found: dict[str, Any]
    if model.get("byte_fallback"):
        found = {
            "tokenizer_model": "llama",
            "tokenizer_pre": "default",
            "token_list": tokens,
            "token_scores": _scores(tokens, merges),
            "token_types": _with_bytes(tokens, kinds, tokenizer.unk_token_id),
            "add_space_prefix": _adds_space(stated),
        }
    else:
        rule = split_rule(stated)
        if rule is None:
            raise _refused(directory, "llama.cpp has no rule like its pre_tokenizer")
        found = {"tokenizer_model": "gpt2", "tokenizer_pre": rule}
        found |= {"token_list": tokens, "token_types": kinds, "token_merges": merges}
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            found[f"{name}_token_id"] = number
    ends = tokenizer("a").input_ids
    found["add_bos_token"] = len(ends) > 1 and ends[0] == tokenizer.bos_token_id
    found["add_eos_token"] = len(ends) > 1 and ends[-1] == tokenizer.eos_token_id
    if isinstance(tokenizer.chat_template, str):
        found["chat_template"] = tokenizer.chat_template
    return found


def split_rule(stated: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of the rule by which a tokenizer.json cuts text before merging, or None."""
    steps = stated.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    *first, last = steps
    if last.get("use_regex", True):
        digits = [step.get("type") == "Digits" and step.get("individual_digits") for step in first]
        return {(): "gpt-2", (True,): "smollm"}.get(tuple(digits))
    if (
        len(first) != 1
        or first[0].get("type") != "Split"
        or first[0].get("behavior") not in ("Isolated", "Removed")
    ):
        return None
    found = _SPLITS.get(first[0].get("pattern", {}).get("Regex", ""))
    whole_words = stated["model"].get("ignore_merges")  # a word that is a token is one, whatever its merges
    return "llama-bpe" if found == "dbrx" and whole_words else found


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        found.backend_tokenizer  # noqa: B018 (a slow one has none)
    except Exception as error:  # whatever a strange tokenizer makes transformers stumble over
        raise CheckpointError(
            f"{directory}: transformers cannot open its tokenizer: {brief(error)}"
        ) from error
    return found


def _tokens(
    stated: Mapping[str, Any], tokenizer: Any, rows: int, directory: Path
) -> tuple[list[str], list[int]]:
    """One token for each row of the embedding; rows without one are named and never made."""
    tokens, kinds = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    known = {number: (token, NORMAL) for token, number in stated["model"]["vocab"].items()}
    for added in stated.get("added_tokens", ()):
        control = added["special"] or re.fullmatch(r"<\|.*\|>|<unused\d+>|<pad>|<mask>", added["content"])
        text = added["content"] if control else added["content"].replace("▁", " ")
        known[added["id"]] = (text, CONTROL if control else USER_DEFINED)
    if known and max(known) >= rows:
        raise _refused(directory, f"it has a token {max(known)}, and the embedding {rows} rows")
    for number, (token, kind) in known.items():
        tokens[number], kinds[number] = token, kind
    return tokens, kinds


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    first: dict[str, float] = {}
    for order, pair in enumerate(merges):
        first.setdefault("".join(pair.split(" ")), -float(order))
    return [first.get(token, _NO_SCORE - len(merges)) for token in tokens]


def _with_bytes(tokens: list[str], kinds: list[int], unknown: int | None) -> list[int]:
    found = [
        BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    if unknown is not None:
        found[unknown] = UNKNOWN
    return found


def _adds_space(stated: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text: a normalizer's work, or a pre-tokenizer's."""
    steps = stated.get("normalizer") or {}
    steps = steps.get("normalizers", [steps])
    before = stated.get("pre_tokenizer") or {}
    return any(step.get("type") == "Prepend" for step in steps) or (
        before.get("type") == "Metaspace" and before.get("prepend_scheme", "always") != "never"
    )


def _refused(directory: Path, why: str) -> OtaroError:
    return OtaroError(
        f"{directory}: its tokenizer cannot be written as GGUF: {why}; "
        "export --to hf, and give that to llama.cpp's own converter"
    )
