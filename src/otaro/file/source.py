"""Where a nested model lies that is not here yet: a repository on the Hub, a directory of one's own server, a
directory.

A source opens a file at a byte, and says what it knows of the whole file: its length, and a tag that changes
when the file does. What it says is a stranger's word. Who reads bounds every length and checks every byte
(`remote.py`, `fetch.py`).

The Hub is asked for a commit and its files by its own client, with its address and token. The files then come
by the same requests as from any server: through the client's cache each byte would lie on the disk twice, and
be put in place unchecked.
"""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote, urlsplit

from otaro.errors import CheckpointError, FetchError, brief
from otaro.file.checkpoint import BUILTIN, HUB, SIDECARS
from otaro.file.coding import CODING_FILE
from otaro.file.header import refuse_file
from otaro.file.hub import Hub
from otaro.file.replace import DECODER_FILE, FITS_FILE, QUALITY_FILE

CONFIG = "config.json"
_TIMEOUT = 30.0  # seconds without a byte
_BESIDE = (CONFIG, CODING_FILE, DECODER_FILE, QUALITY_FILE, FITS_FILE, *SIDECARS)
# A plain server has no listing that one could rely on, so these are asked for one by one. They are what
# `otaro pack` and transformers call the files of _BESIDE.
_USUAL = (
    CONFIG, CODING_FILE, DECODER_FILE, QUALITY_FILE, FITS_FILE, "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt",
    "LICENSE.md", "NOTICE", "NOTICE.txt",
)  # fmt: skip
_GONE = (404, 410)
_LATER = (408, 425, 429, 500, 502, 503, 504)


class CutOff(Exception):
    """The connection broke off, or the server asks for patience: another try may do."""


class Changed(Exception):
    """The file at the source is another one than a moment ago."""


@dataclass(frozen=True)
class Piece:
    """A file from `start` on."""

    stream: Any
    start: int
    size: int | None
    """Bytes of the whole file, where the source says."""
    tag: str | None
    ends: bool
    """Whether a stream that breaks off can be told from one that is complete."""

    def read(self, count: int) -> bytes:
        """Some of the next `count` bytes; none at the end."""
        try:
            data: bytes = self.stream.read(count)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: a chunk without a length
            raise CutOff(brief(error)) from error
        return data

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes, all of them."""
        data = b""
        while len(data) < count:
            if not (more := self.read(count - len(data))):
                raise CutOff(f"it ended after {self.start + len(data)} bytes")
            data += more
        return data


class Source(Protocol):
    """A directory somewhere; `str` of it is what the user calls it."""

    def beside(self) -> list[str]:
        """Names of the files beside the shards that may be there."""

    @contextmanager
    def open(
        self, name: str, start: int = 0, end: int | None = None, tag: str | None = None
    ) -> Iterator[Piece | None]:
        """A file from `start` on, or from its beginning if the source cannot or the tag is gone; or None."""
        yield None


def find_source(model: str | os.PathLike[str], hub: Hub = HUB) -> Source:
    """A URL, a directory, or a Hub id, whose revision is pinned now."""
    text = str(model)
    scheme = urlsplit(text).scheme.lower() if "://" in text else ""
    if scheme and hub.revision is not None:
        raise CheckpointError(
            f"{text} is not on the Hub and has no revision {hub.revision!r}; leave the revision out"
        )
    if scheme in ("http", "https"):
        return Server(_checked(text))
    if scheme == "file":
        return Directory(_path_of(text))
    if scheme:
        raise FetchError(
            f"{text}: nothing is fetched by {scheme}://; use http, https or file, a directory or a Hub id"
        )
    if Path(model).exists() or text == BUILTIN:
        if hub.revision is not None:
            raise CheckpointError(
                f"{text} is on this machine and has no revision {hub.revision!r}; leave the revision out"
            )
        return Directory(Path(model))
    commit, files = hub.files(text)
    return Repository(text, commit, files, hub)


@dataclass(frozen=True)
class Directory:
    """A directory of this machine, or one that is mounted."""

    path: Path

    def __post_init__(self) -> None:
        """Refuse what is none."""
        refuse_file(self.path)
        if not self.path.is_dir():
            raise FetchError(f"{self.path} is not a directory; give one that `otaro pack` wrote")

    def __str__(self) -> str:
        return str(self.path)

    def beside(self) -> list[str]:
        """What lies there."""
        return _wanted(path.name for path in self.path.iterdir())

    @contextmanager
    def open(
        self, name: str, start: int = 0, end: int | None = None, tag: str | None = None
    ) -> Iterator[Piece | None]:
        """A file; its time of change is the tag."""
        try:
            file = (self.path / name).open("rb")
        except (FileNotFoundError, IsADirectoryError):
            yield None
            return
        except OSError as error:
            raise FetchError(f"{self.path / name} cannot be read: {error.strerror}") from error
        with file:
            status = os.fstat(file.fileno())
            now = f"{status.st_mtime_ns}-{status.st_size}"
            start = start if tag in (None, now) else 0
            file.seek(start)
            yield Piece(file, start, status.st_size, now, ends=True)


@dataclass(frozen=True)
class Server:
    """A directory that a server serves file by file."""

    url: str

    def __str__(self) -> str:
        return self.url

    def beside(self) -> list[str]:
        """What may be there: see _USUAL."""
        return list(_USUAL)

    def open(self, name: str, start: int = 0, end: int | None = None, tag: str | None = None) -> Any:
        """A file by GET."""
        return _get(f"{self.url}/{quote(name)}", {}, start, end, tag)


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub, at one commit."""

    name: str
    commit: str
    files: list[str]
    hub: Hub = field(repr=False)

    def __str__(self) -> str:
        return self.name

    def beside(self) -> list[str]:
        """What the commit has."""
        return _wanted(self.files)

    @contextmanager
    def open(
        self, name: str, start: int = 0, end: int | None = None, tag: str | None = None
    ) -> Iterator[Piece | None]:
        """A file by GET, from the Hub or where it sends us; the token stays with the Hub."""
        if name not in self.files:
            yield None
            return
        url, headers = self.hub.address(self.name, self.commit, name)
        with _get(url, headers, start, end, tag) as piece:
            yield piece


def _wanted(names: Any) -> list[str]:
    """Of names that a stranger lists: those of files beside the shards, in this very directory."""
    plain = [name for name in names if re.fullmatch(r"[A-Za-z0-9_][\w.\- ]*", name)]
    return sorted(name for name in plain if any(fnmatch(name, pattern) for pattern in _BESIDE))


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.username is not None or parts.query or parts.fragment or not parts.hostname:
        raise FetchError(
            "a server's directory is given as http://HOST/PATH, without password, query or #, not "
            f"{parts.scheme}://…"
        )
    return url.rstrip("/")


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise FetchError(
            f"{url}: file:// is for this machine; write file:///DIR, or mount {parts.netloc}'s files"
        )
    return Path(urllib.request.url2pathname(parts.path))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Where a server sends us: by HTTP alone, not back from https to http; a token to its host alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            raise urllib.error.HTTPError(newurl, code, f"it redirects to {new.scheme}://", headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            request.remove_header("Authorization")
        return request


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and nothing else: the library's own opener would follow to ftp, and knows file."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


@contextmanager
def _get(
    url: str, headers: Mapping[str, str], start: int, end: int | None, tag: str | None
) -> Iterator[Piece | None]:
    request = urllib.request.Request(url, headers={**headers, "Accept-Encoding": "identity"})
    if start or end is not None:
        request.add_header("Range", f"bytes={start}-{'' if end is None else end - 1}")
        if tag is not None:
            request.add_header("If-Range", tag)
    try:
        response = _opener().open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _GONE:
            yield None
            return
        raise _refusal(url, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise CutOff(brief(error)) from error
    with closing(response):
        yield _piece(url, response, start)


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    if error.code in _LATER:
        return CutOff(f"the server answers {error.code}")
    if error.code == 416:
        return Changed()
    why = {401: "it asks who you are", 403: "it does not let you"}.get(error.code, str(error.reason))
    return FetchError(f"{url} cannot be fetched: {why} (HTTP {error.code})")


def _piece(url: str, response: Any, start: int) -> Piece:
    headers: Message = response.headers
    stated, tag = headers.get("Content-Length", ""), headers.get("ETag")
    length = int(stated) if re.fullmatch(r"[0-9]{1,18}", stated) else None
    if tag is not None and tag.startswith("W/"):  # may stay the same for other bytes
        tag = None
    tag, ends = tag or headers.get("Last-Modified"), length is not None or response.chunked
    if response.status == 200:
        return Piece(response, 0, length, tag, ends)
    part = re.fullmatch(
        r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", headers.get("Content-Range", "").strip()
    )
    if response.status != 206 or part is None or int(part[1]) != start:
        raise FetchError(
            f"{url}: the server answers other bytes than those asked for (HTTP {response.status})"
        )
    return Piece(response, start, None if part[2] == "*" else int(part[2]), tag, ends)
