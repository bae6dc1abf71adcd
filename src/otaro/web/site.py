"""The folder of a page: `write_site` puts it together, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from otaro.errors import OtaroError
from otaro.file.atomic import check_place, new_directory
from otaro.file.header import BASE, shard_name, untrusted_json
from otaro.file.io import NestedDirectory
from otaro.file.replace import DECODER_FILE
from otaro.web import build, libraries

VERSION = 1
"""Of page.json, which worker.js reads."""

_PAGE = Path(__file__).parent / "page"
_SHARED = Path(__file__).parents[1] / "serve" / "page"  # what looks the same on the server's page
_TEXT = ("tokenizer.json", "tokenizer_config.json")
_STEP = 1 << 22  # bytes copied between two words on progress

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Site:
    """What was written."""

    bytes: int
    base_bytes: int
    """That come before the first answer."""
    finest: str
    files: str
    """Where the shards come from."""


def write_site(
    directory: Path,
    out: Path,
    *,
    name: str | None = None,
    files: str | None = None,
    progress: Progress = lambda *_: None,
) -> Site:
    """A page for a nested directory, in `out`; shards in it, or from `files`, where they lie already."""
    check_place(out)
    nested = NestedDirectory(directory)
    if files is not None:
        files = _checked(files)
    about = _about(directory)
    description = _description(directory)
    finest = nested.finest
    total = sum(nested.sizes[bits] for bits in range(BASE, finest.mantissa_bits + 1))
    progress("compiling the decoder, minutes the first time", 0, total)
    modules = [build.build(one) for one in (build.ONE, build.MANY)]
    progress("fetching the tokenizer", 0, total)
    brought = [libraries.bring(one) for one in libraries.LIBRARIES]
    shards = [
        {"name": shard_name(bits), "bits": bits, "bytes": nested.sizes[bits]}
        for bits in range(BASE, finest.mantissa_bits + 1)
    ]
    stated = {
        "version": VERSION,
        "name": name or directory.resolve().name,
        "model": nested.base.header.model,
        "from": files or "model/",
        "shards": shards,
        **about,
    }
    with new_directory(out) as folder:
        for path in [*sorted(_PAGE.iterdir()), _SHARED / "page.css", _SHARED / "icon.svg", *modules]:
            shutil.copyfile(path, folder / path.name)
        (folder / "lib").mkdir()
        for one in brought:
            for path in sorted(one.iterdir()):
                shutil.copyfile(path, folder / "lib" / path.name)
        (folder / "model").mkdir()
        for kept in _TEXT:
            shutil.copyfile(directory / kept, folder / "model" / kept)
        (folder / "model" / DECODER_FILE).write_text(description)
        (folder / "page.json").write_text(json.dumps(stated, indent=1) + "\n")
        if files is None:
            _copy([directory / str(one["name"]) for one in shards], folder / "model", progress)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Site(written, nested.sizes[BASE], str(finest), files or "model/")


def _checked(files: str) -> str:
    """Where shards lie, as a page may ask for them."""
    parts = urlsplit(files)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise OtaroError(
            f"{files} is not a place that a page can fetch from; give http(s)://HOST/PATH of the directory"
        )
    return files if files.endswith("/") else files + "/"


def _about(directory: Path) -> dict[str, Any]:
    """What a page needs to know of the tokenizer, besides its files."""
    from otaro.runtime.load import load_tokenizer

    for kept in _TEXT:
        if not (directory / kept).is_file():
            raise OtaroError(
                f"{directory} has no {kept}, which a page makes tokens by; copy it from the original model"
            )
    tokenizer = load_tokenizer(directory)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return {"chat_template": template, "special_tokens": special, "stop": _stop(directory, tokenizer)}


def _stop(directory: Path, tokenizer: Any) -> list[int]:
    """The tokens that end an answer."""
    for kept in ("generation_config.json", "config.json"):
        try:
            stated = untrusted_json((directory / kept).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise OtaroError(f"{directory / kept} is no JSON: {error}") from error
        found = stated.get("eos_token_id") if isinstance(stated, dict) else None
        if found is not None:
            return [int(one) for one in (found if isinstance(found, list) else [found])]
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _description(directory: Path) -> str:
    """decoder.json as it is, or made for a directory of before it; refused where no decoder serves it."""
    if (directory / DECODER_FILE).is_file():
        return (directory / DECODER_FILE).read_text(encoding="utf-8")
    from otaro.runtime.architectures import why_not
    from otaro.runtime.decoder_file import decoder_text
    from otaro.runtime.load import load

    model = load(directory, "E5M3")
    if reason := why_not(model):
        raise OtaroError(f"{directory} runs in Python only, and not in a page: {reason}")
    return decoder_text(model)


def _copy(shards: list[Path], folder: Path, progress: Progress) -> None:
    total, done = sum(path.stat().st_size for path in shards), 0
    for path in shards:
        with path.open("rb") as source, (folder / path.name).open("wb") as target:
            while some := source.read(_STEP):
                target.write(some)
                done += len(some)
                progress(path.name, done, total)
