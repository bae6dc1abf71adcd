"""Two libraries of Hugging Face's that a page takes for text, from npm: what `tokenizer.json` says, and chat
templates.

Each is one file without dependencies. Versions are fixed, and so is the hash of what npm packs: anything else
is refused.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from otaro.errors import OtaroError
from otaro.file.atomic import new_directory
from otaro.web import cache

_LARGEST = 1 << 21  # bytes of one file


@dataclass(frozen=True)
class Library:
    """A package of npm, and the file of it that is wanted."""

    package: str
    version: str
    integrity: str
    """As npm writes it."""
    member: str
    file: str
    """What a page imports it as."""

    @property
    def key(self) -> str:
        """Of the cache."""
        return f"{self.file.removesuffix('.js')}-{self.version}"


LIBRARIES = (
    Library(
        "@huggingface/tokenizers",
        "0.2.0",
        "sha512-LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        "package/dist/tokenizers.min.mjs",
        "tokenizers.js",
    ),
    Library(
        "@huggingface/jinja",
        "0.5.10",
        "sha512-SgS1D1bglQ94ceD4ZCL6eayUDy9uV1xuyk61OjgSxU5GJh7upqZCKII0JoTYMc6wWsg3JUgaPRX0ElQzXPk3Cw==",
        "package/dist/index.js",
        "jinja.js",
    ),
)


def bring(library: Library) -> Path:
    """A folder with the library's file and its licence, fetched now or before."""
    target = cache.folder() / library.key
    if target.is_dir():
        return target
    if shutil.which("npm") is None:
        raise OtaroError(
            "pages take their tokenizer from npm, which is not installed here; install "
            "Node.js, which brings it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, new_directory(target) as out:
        named = f"{library.package}@{library.version}"
        command = ["npm", "pack", "--silent", "--ignore-scripts", named]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        packed = next(Path(folder).glob("*.tgz"), None)
        if done.returncode or packed is None:
            raise OtaroError(
                f"npm could not fetch {named}: {(done.stderr or done.stdout).strip() or 'it says nothing'}"
            )
        _unpack(library, packed.read_bytes(), packed, out)
    return target


def _unpack(library: Library, content: bytes, packed: Path, out: Path) -> None:
    found = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != library.integrity:
        raise OtaroError(
            f"npm sent another {library.package} {library.version} than this version of otaro was tested "
            "with "
            f"({found[:20]}... instead of {library.integrity[:20]}...); nothing of it is used"
        )
    with tarfile.open(packed) as archive:
        for member, name in ((library.member, library.file), ("package/LICENSE", f"{library.file}.LICENSE")):
            file = archive.extractfile(member)
            assert file is not None  # the hash says what is in it
            (out / name).write_bytes(file.read(_LARGEST))
