"""A directory, or a file, appears whole or not at all.

`new_directory` hands out a hidden sibling of the target to write into. Leaving the block well flushes every
file to disk and renames the sibling into place in one step; leaving it by an exception removes it. A process
that is killed leaves only the sibling, which nothing loads and which the next writer to the same target
sweeps away. `new_file` does the same for one file, `write_text` for one of a few words, and `update_text` for
one whose new text depends on the old.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from otaro.errors import TargetError

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers to one target are then not told apart
    fcntl = None  # type: ignore[assignment]

_REFUSED_BY_SYSTEM = {
    errno.ENOSPC: "the disk is full; free some space or choose another place",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another place",
    errno.EFBIG: "the file would be larger than this system allows (see `ulimit -f`)",
    errno.EROFS: "the file system of {folder} is read-only; choose another place",
    errno.EACCES: "you may not write in {folder}; choose another place",
    errno.EPERM: "you may not write in {folder}; choose another place",
    errno.ENOTDIR: "a part of that path is a file, not a directory",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EEXIST: "a part of that path is a file, not a directory",
    errno.ENOENT: "nothing can be made in {folder}; choose another place",  # as in /proc
}


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn the system's refusals to write `target` into a `TargetError` that says what to do."""
    try:
        yield
    except OSError as error:
        at = None if error.filename is None else Path(os.fsdecode(error.filename))
        around = at in target.parents or at == _lock(target)  # what is made before anything is written
        concerned = (
            at is None or around or any(at.is_relative_to(path) for path in (target, _partial(target)))
        )
        advice = _REFUSED_BY_SYSTEM.get(error.errno or 0)
        if not concerned or advice is None or (error.errno == errno.ENOENT and not around):
            raise
        folder = next((path for path in target.parents if os.access(path, os.F_OK)), target.parent).absolute()
        raise TargetError(f"cannot write {target}: {advice.format(folder=folder)}") from error


@contextmanager
def new_directory(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `target` when the block ends without an exception.

    An existing target is refused unless it is an empty directory or `overwrite` is set; then it stays as it
    is until the moment of exchange.
    """
    target = Path(os.path.realpath(target))
    partial = _partial(target)
    with explained(target):
        check_place(target, overwrite)
        with alone(target):
            _remove(partial)  # what a killed writer left
            partial.mkdir()
            try:
                yield partial
                for path in [*partial.rglob("*"), partial]:
                    if not path.is_symlink():  # which has no content of its own, and may lead nowhere
                        flush(path)
                _move_into_place(partial, target)
            finally:
                _remove(partial)


def check_place(target: Path, overwrite: bool = False) -> None:
    """Refuse where `new_directory` puts nothing, for those who compute for hours before."""
    if target == Path.cwd():
        raise TargetError(
            f"{target} is the current directory, which cannot be put in place; name a new directory"
        )
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} exists and is not a directory; choose another place")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise TargetError(f"{target} exists and is not empty; choose another place")


@contextmanager
def new_file(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """The same for one large file: yield the path to write; it becomes `target` when the block ends well."""
    target = Path(os.path.realpath(target))
    partial = _partial(target)
    with explained(target):
        if target.is_dir():
            raise TargetError(f"{target} is a directory; choose another place")
        if target.exists() and not overwrite:
            raise TargetError(f"{target} exists; choose another place")
        with alone(target):
            partial.unlink(missing_ok=True)  # what a killed writer left
            try:
                yield partial
                flush(partial)
                os.rename(partial, target)
                flush(target.parent)
            finally:
                partial.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Put a file in place in one step, its directory too if there is none; what was there stays till then."""
    update_text(target, lambda: text)


def update_text(target: Path, make: Callable[[], str]) -> None:
    """Like `write_text`, with a text that is made, from the old one perhaps, while no other process writes
    the target.

    Who comes second waits.
    """
    partial = _partial(target)
    with explained(target), alone(target, wait=True):
        text = make()
        partial.unlink(missing_ok=True)  # what a killed writer left
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def alone(target: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock beside `target`, in a folder that is made if there is none.

    While a live process holds it, wait or be refused. That of a killed one is nobody's.
    """
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = None if fcntl is None else _locked(target, wait)
    try:
        yield
    finally:
        if lock is not None:
            _lock(target).unlink(missing_ok=True)
            os.close(lock)


def _locked(target: Path, wait: bool) -> int:
    """The descriptor of the lock beside `target`, which is ours from now on."""
    path = _lock(target)
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(lock)
            raise TargetError(
                f"another process is writing {target} right now; wait for it to finish"
            ) from None
        os.close(lock)  # its holder finished and removed it in the meantime


def _partial(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def _lock(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Have the disk hold what a file contains, or which names a directory has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(partial: Path, target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        if not _exchange(partial, target):
            # Without an atomic exchange there is an instant with no target; the old one is then beside it,
            # whole.
            old = target.parent / f".{target.name}.old"
            _remove(old)
            os.rename(target, old)
            os.rename(partial, target)
            _remove(old)
    else:
        os.rename(partial, target)
    flush(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically, where the system can (Linux); the first path then has the old."""
    at_current_directory, exchange_flag = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    paths = (at_current_directory, os.fsencode(first), at_current_directory, os.fsencode(second))
    return bool(renameat2(*paths, exchange_flag) == 0)
