"""A server for such a folder on this machine: `python -m otaro.web.server OUT`.

Static files, byte ranges, and the two headers that let a page use threads.
"""

from __future__ import annotations

import argparse
import http.server
import re
import shutil
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, ClassVar

from otaro.errors import OtaroError

ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
_TYPES = {
    ".js": "text/javascript",
    ".wasm": "application/wasm",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Handler(http.server.SimpleHTTPRequestHandler):
    """The standard library's, with one range of bytes and the headers."""

    protocol_version = "HTTP/1.1"
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, **_TYPES}  # noqa: RUF012
    headers_of_all: ClassVar[dict[str, str]] = ISOLATED
    _left: int | None = None

    def end_headers(self) -> None:
        """With those that every answer has."""
        for name, value in self.headers_of_all.items():
            self.send_header(name, value)
        super().end_headers()

    def send_head(self) -> Any:
        """A part of a file, where one is asked for."""
        self._left = None
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            return super().send_head()
        size = path.stat().st_size
        first, last = int(asked[1]), min(int(asked[2] or size - 1), size - 1)
        if first > last:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        file = path.open("rb")  # which the caller closes
        file.seek(first)
        self._left = last + 1 - first
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(self._left))
        self.end_headers()
        return file

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """No more than the part."""
        if self._left is None:
            shutil.copyfileobj(source, outputfile)
        else:
            _copy_some(source, outputfile, self._left)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def _copy_some(source: IO[bytes], target: IO[bytes], count: int) -> None:
    while count and (some := source.read(min(count, 1 << 16))):
        target.write(some)
        count -= len(some)


def server(folder: Path, port: int = 0, handler: type[Handler] = Handler) -> http.server.ThreadingHTTPServer:
    """Listening on this machine alone; port 0 is any that is free."""
    if not (folder / "page.json").is_file():
        raise OtaroError(f"{folder} is no page; write one with `otaro web DIR {folder}`")
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(handler, directory=str(folder)))
    except OSError as error:
        raise OtaroError(f"port {port} cannot be used ({error.strerror}); choose another") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m otaro.web.server", description="Serve a page on this machine."
    )
    parser.add_argument("folder", type=Path, help="what `otaro web` wrote")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    try:
        running = server(options.folder, options.port)
    except OtaroError as error:
        parser.exit(1, f"{error}\n")
    print(f"http://localhost:{running.server_port}/ has it; Ctrl-C ends it", flush=True)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        running.server_close()


if __name__ == "__main__":
    main()
