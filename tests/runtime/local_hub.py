"""A Hub on 127.0.0.1: as much of its HTTP interface as fetching models takes: the real client runs on it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """The files of each commit by path, commits by branch or tag, and the token that it takes to see them."""

    name: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    withheld: str | None = None
    """A file that this Hub fails to deliver."""

    def commit(self, ref: str, directory: Path, subfolder: str = "") -> str:
        """Add a directory's files as a commit, and let `ref` point to it."""
        files = {
            f"{subfolder}{path.name}": path.read_bytes()
            for path in sorted(directory.iterdir())
            if path.is_file()
        }
        name = hashlib.sha1(repr((ref, len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        self.refs[ref] = name
        return name


@dataclass
class LocalHub:
    """Repositories by name; `requests` notes method, path and token of everything asked for."""

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)
    """Path and bytes of every file, or part of one, that was answered."""

    def fetched(self) -> list[str]:
        """Names of the files that were downloaded."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def sent_of(self, name: str) -> int:
        """Bytes of all files of this name together."""
        return sum(size for path, size in self.sent if path.endswith(f"/{name}"))

    def answer(self, method: str, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.requests.append((method, path, token))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        about = parts[:2] == ["api", "models"]
        parts = parts[2:] if about else parts
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None or (repository.token is not None and repository.token != token):
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid credentials"}, b""
        what, revision, file = (
            (parts[2], parts[3], "/".join(parts[4:])) if len(parts) > 3 else ("revision", "main", "")
        )
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files, headers = repository.commits[commit], {"X-Repo-Commit": commit}
        blobs = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return (
                200,
                headers,
                json.dumps({"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings}).encode(),
            )
        if what == "tree":
            entries = [{"type": "file", "path": n, "size": len(d), "oid": blobs[n]} for n, d in files.items()]
            return 200, headers, json.dumps(entries).encode()
        if file == repository.withheld:
            return 403, headers, b""
        if file not in files:
            return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b""
        return 200, {**headers, "ETag": f'"{blobs[file]}"', "Accept-Ranges": "bytes"}, files[file]


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Serve a hub without repositories until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
            known = token if scheme == "Bearer" else None
            status, headers, body = hub.answer(self.command, urlsplit(self.path).path, known)
            if status == 200 and (
                wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            ):
                start, size = int(wanted[1]), len(body)
                end = min(int(wanted[2] or size - 1), size - 1)
                status, body = 206, body[start : end + 1]
                headers["Content-Range"] = f"bytes {start}-{end}/{size}"
            if self.command == "GET":
                hub.sent.append((urlsplit(self.path).path, len(body)))
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                **headers,
                "Content-Length": str(len(body)),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = LocalHub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
