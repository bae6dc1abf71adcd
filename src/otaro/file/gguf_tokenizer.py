"""The tokenizer that a GGUF file states, as files that transformers opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "dbrx": _CONTRACTIONS + "|" + _WORD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES,
    "qwen2": _CONTRACTIONS + "|" + _WORD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES,
    "tekken": f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"
    + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _SPACES,
}
"""{llama.cpp's name of a rule: the regular expression that a tokenizer.json has for it}."""
_SAME = {
    "mpt": "gpt-2", "olmo": "gpt-2", "refact": "smollm", "starcoder": "smollm", "codeshell": "smollm",
    "smaug-bpe": "dbrx", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "stablelm2": "qwen2",
}  # fmt: skip


def write_tokenizer(fields: Mapping[str, Any], directory: Path, positions: int | None = None) -> str:
    """Write the files of the tokenizer; returns why not, in words, where there is none or an unknown one."""
    from transformers import PreTrainedTokenizerFast

    stated = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in fields.items()
        if name.startswith("tokenizer.")
    }
    tokens, kinds = stated.get("tokens"), stated.get("token_type")
    if stated.get("model") not in ("gpt2", "llama") or not isinstance(tokens, list):
        return f"a tokenizer of the kind {stated.get('model', 'none')!r} is not read here"
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(tokens) else [NORMAL] * len(tokens)
    try:
        made = _byte_level(stated, tokens) if stated["model"] == "gpt2" else _sentence_pieces(stated, tokens)
        if made is None:
            return f"its rule for cutting text, {stated.get('pre')!r}, is not known here"
        special = {}
        for name, word in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
            number = stated.get(f"{name}_token_id")
            if type(number) is int and 0 <= number < len(tokens):
                special[f"{word}_token"] = tokens[number]
        _add(made, tokens, kinds, stated, special.get("bos_token"))
        template = fields.get("tokenizer.chat_template")
        limit = {"model_max_length": positions} if positions else {}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **limit, **special)
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # whatever odd tokens make the library stumble over; its own panics are no `Exception`
        return f"no tokenizer can be made of its tokens: {str(error)[:100]}"
    return ""


def _byte_level(stated: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    rule = _SAME.get(stated.get("pre", ""), stated.get("pre"))
    first: list[Any]
    if rule in ("gpt-2", "smollm"):
        first = [pre_tokenizers.Digits(individual_digits=True)] if rule == "smollm" else []
    elif rule == "llama-bpe" or rule in SPLITS:
        first = [pre_tokenizers.Split(Regex(SPLITS["dbrx" if rule == "llama-bpe" else rule]), "isolated")]
    else:
        return None
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in stated.get("merges", [])]
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in ("llama-bpe", "tekken")))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in ("gpt-2", "smollm"))
    made.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_pieces(stated: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary, stated["scores"])
    unknown = stated.get("unknown_token_id")
    made = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[unknown] if type(unknown) is int else None,
        )
    )
    before = [normalizers.Prepend("▁")] if stated.get("add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if before else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token; the one with the highest score is merged first."""
    found = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add(
    made: Any, tokens: list[str], kinds: list[int], stated: Mapping[str, Any], begin: str | None
) -> None:
    """Tokens that are found in the text before anything is merged, and the one that texts begin with."""
    from tokenizers import AddedToken, processors

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, its in zip(tokens, kinds, strict=True)
            if its == kind
        ]
        (made.add_special_tokens if special else made.add_tokens)(added)
    adds = stated.get(
        "add_bos_token", stated["model"] == "llama" or stated.get("pre") in ("llama-bpe", "tekken")
    )
    if adds and begin is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0",
            pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
            special_tokens=[(begin, tokens.index(begin))],
        )
