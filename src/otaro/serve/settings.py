"""Every limit and choice of a server, with its default."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from otaro.errors import OtaroError
from otaro.file.fits import is_fit
from otaro.runtime.draft import Draft
from otaro.sefp.precision import PRECISIONS, Precision

_ORIGIN = "write it as https://page.example or http://localhost:3000, or * for all"


@dataclass(frozen=True)
class Settings:
    """What `otaro serve` takes as options, which say what each of them means."""

    precision: str | None = None
    """Of requests that name none: a precision, a fit, auto, or else the finest that is there."""
    draft: str | None = None
    """Of requests that name none, as far as it is coarser than what they are answered at."""
    keys: tuple[str, ...] = ()
    """Any of them opens; none: open to all who can connect."""
    origins: tuple[str, ...] = ()
    """Web pages from elsewhere that may call (CORS)."""
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    """Of an answer; by default what fits behind the prompt."""
    max_queue: int = 64
    """Answers that may wait for a place, besides those being written."""
    max_connections: int = 256
    """Requests at one time, whatever they want."""
    timeout: float = 600.0
    """Seconds for an answer, waiting included."""
    read_timeout: float = 30.0
    """Seconds for a request to arrive."""
    write_timeout: float = 30.0
    """Seconds that a client may leave a full buffer unread."""
    shutdown_timeout: float = 30.0
    """Seconds that answers have left when the server is told to end."""
    log_prompts: bool = False
    auto_finest: str | None = None
    """Of precision auto; by default the finest that is there."""
    auto_coarsest: str = "E5M3"
    auto_interval: float = 1.0
    """Seconds between two steps of precision auto."""
    auto_margin: float = 0.2
    """Decisions by a smaller margin of probability are asked again at the finest."""
    release_after: float = 300.0
    """Seconds after which planes that nobody used give their memory back."""

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_connections",
            "timeout",
            "read_timeout",
            "write_timeout",
            "auto_interval",
        ):
            if not getattr(self, name) > 0:
                raise OtaroError(f"{name}={getattr(self, name)}: give more than 0")
        for name in ("max_prompt_tokens", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise OtaroError(f"{name}={value}: one at least")
        for name in ("max_queue", "shutdown_timeout", "release_after"):
            if getattr(self, name) < 0:
                raise OtaroError(f"{name}={getattr(self, name)}: give 0 or more")
        if not 0 <= self.auto_margin <= 1:
            raise OtaroError(
                f"auto_margin={self.auto_margin}: give a difference of probabilities, from 0 to 1"
            )
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.keys):
            raise OtaroError("an API key is made of printable ASCII characters without spaces, one at least")
        check_origins(self.origins, "origins")
        draft = Draft.of(self.draft)
        if draft is not None and draft.precision == (finest := PRECISIONS[0]):
            raise OtaroError(
                f"draft={self.draft!r}: a draft is coarser than what it serves, and {finest} is the finest "
                "there is; choose a coarser one, or leave it out"
            )
        if self.precision not in (None, "auto") and not is_fit(self.precision):
            Precision(self.precision or "")
        if self.auto_finest and Precision(self.auto_finest) < Precision(self.auto_coarsest):
            raise OtaroError(
                f"auto_finest={self.auto_finest}: is coarser than {self.auto_coarsest}, the coarsest that "
                "auto may choose"
            )


def check_origins(origins: Iterable[str], named: str) -> None:
    """Refuse what no browser gives as a page's origin; `named` is what they were given as."""
    for one in origins:
        # browsers write them in small letters, and `null` for a page from a file
        if one not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[!-~]+", one):
            raise OtaroError(f"{named} {one!a}: it is no origin; {_ORIGIN}")
        host = one.partition("://")[2]
        if re.search(r"[A-Z/?#@\\]", host):
            raise OtaroError(f"{named} {one!a}: an origin has no path and no capitals; {_ORIGIN}")
