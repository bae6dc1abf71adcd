"""A directory appears whole or not at all: through exceptions, full disks, and `kill -9`."""

import errno
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

import otaro
from otaro.errors import TargetError
from otaro.file import atomic
from otaro.file.atomic import alone, new_directory, new_file, write_text
from otaro.file.io import NestedDirectory


@pytest.fixture
def target(tmp_path):
    """A path in a directory of its own, so that everything left beside it shows."""
    (tmp_path / "room").mkdir()
    return tmp_path / "room" / "model"


def left_in_room(target):
    return sorted(path.name for path in target.parent.iterdir())


def write(target, text, **options):
    with new_directory(target, **options) as directory:
        (directory / "file").write_text(text)


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) is a new tmpfs; needs root."""
    mounts = []

    def mount(options):
        point = tmp_path / f"mount{len(mounts)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(
                f"mounting a small file system needs root and its permission here: {done.stderr.strip()}"
            )
        mounts.append(point)
        return point

    yield mount
    for point in mounts:
        subprocess.run(["umount", "--lazy", point], check=True)


# new_directory


def test_the_directory_appears_when_the_block_ends(target):
    with new_directory(target) as directory:
        (directory / "file").write_text("new")
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("too")
        assert not target.exists()
        assert directory.parent == target.parent  # the same file system, or renaming would not be one step
        assert directory.name.startswith(".")
    assert (target / "file").read_text() == "new"
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == ["file", "sub", "sub/file"]
    assert left_in_room(target) == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [None, "old"], ids=["no target", "old target"])
def test_an_exception_leaves_everything_as_it_was(target, error, before):
    if before:
        write(target, before)

    def fail():
        with new_directory(target, overwrite=True) as directory:
            (directory / "file").write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        fail()
    assert left_in_room(target) == (["model"] if before else [])
    assert not before or (target / "file").read_text() == "old"


def test_parents_are_made_and_a_relative_path_is_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("some/where/model"), "new")
    assert (tmp_path / "some" / "where" / "model" / "file").read_text() == "new"


def test_an_empty_target_is_used(target):
    target.mkdir()
    write(target, "new")
    assert (target / "file").read_text() == "new"
    assert left_in_room(target) == ["model"]


def test_an_existing_target_is_refused_before_anything_is_written(target):
    write(target, "old")
    with pytest.raises(TargetError, match="exists and is not empty; choose another place"):
        write(target, "new")
    assert (target / "file").read_text() == "old"
    assert left_in_room(target) == ["model"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwriting_replaces_the_old_directory_whole(target, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    with new_directory(target) as directory:
        (directory / "file").write_text("old")
        (directory / "only-old").write_text("old")
    with new_directory(target, overwrite=True) as directory:
        (directory / "file").write_text("new")
        assert (target / "file").read_text() == "old"
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("file", "new")]
    assert left_in_room(target) == ["model"]


@pytest.mark.parametrize("content", [[], ["file"]], ids=["empty", "filled"])
def test_overwriting_a_link_to_a_directory_works_twice_and_leaves_nothing_beside(target, tmp_path, content):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in content:
        (elsewhere / name).write_text("old")
    target.symlink_to(elsewhere)
    for text in ("new", "newer"):
        write(target, text, overwrite=True)
        assert (target / "file").read_text() == text
        assert left_in_room(target) == ["model"]


def test_a_file_in_the_way_is_refused(target):
    target.write_text("mine")
    with pytest.raises(TargetError, match="exists and is not a directory"):
        write(target, "new", overwrite=True)
    with pytest.raises(TargetError, match="a part of that path is a file, not a directory"):
        write(target / "model", "new")
    assert target.read_text() == "mine"


def test_a_second_writer_is_refused_while_the_first_one_writes(target):
    with new_directory(target) as directory:
        (directory / "file").write_text("first")
        with pytest.raises(
            TargetError,
            match=r"another process is writing .*model right now; wait for it "
            r"to finish",
        ):
            write(target, "second")
    assert (target / "file").read_text() == "first"
    assert left_in_room(target) == ["model"]


@pytest.mark.parametrize("step", ["flush", "_move_into_place"])
def test_a_second_writer_is_refused_while_the_first_one_finishes(target, monkeypatch, step):
    """Flushing a large model takes minutes, in which a second writer must not sweep away the first's."""
    original, refusals = getattr(atomic, step), []

    def with_second_writer(*args):
        monkeypatch.setattr(atomic, step, original)
        try:
            write(target, "second")
        except TargetError as error:
            refusals.append(str(error))
        original(*args)

    monkeypatch.setattr(atomic, step, with_second_writer)
    write(target, "first")
    assert (target / "file").read_text() == "first"
    assert len(refusals) == 1


def test_writers_to_different_targets_do_not_meet(target):
    with new_directory(target) as first, new_directory(target.with_name("other")) as second:
        (first / "file").write_text("first")
        (second / "file").write_text("second")
    assert (target / "file").read_text() == "first"
    assert (target.with_name("other") / "file").read_text() == "second"


def test_what_a_killed_writer_left_is_swept_away(target, tmp_path):
    (tmp_path / "mine").write_text("mine")
    left = target.parent / ".model.partial"
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "file").write_text("left")
    (left / "other").write_text("left")
    (left / "link").symlink_to(tmp_path)
    (left / ".lock").write_text("")
    write(target, "new")
    assert [path.name for path in target.iterdir()] == ["file"]
    assert left_in_room(target) == ["model"]
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("before", [None, "old"], ids=["no target", "old target"])
def test_everything_is_on_disk_before_the_directory_appears_and_its_name_after(target, monkeypatch, before):
    if before:
        write(target, before)
    events = []
    real_fsync, real_move = os.fsync, atomic._move_into_place

    def fsync(descriptor):
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_fsync(descriptor)

    def move(partial, target):
        events.append("move")
        real_move(partial, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(atomic, "_move_into_place", move)
    with new_directory(target, overwrite=True) as directory:
        (directory / "file").write_text("new")
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("too")
    moved = events.index("move")
    assert set(events[:moved]) == {str(directory / part) for part in (".", "file", "sub", "sub/file")}
    assert events[moved + 1 :] == [str(target.parent)]


@pytest.mark.parametrize(
    ("code", "advice"), atomic._REFUSED_BY_SYSTEM.items(), ids=lambda value: errno.errorcode.get(value, "")
)
def test_a_refusal_of_the_system_is_explained(target, code, advice):
    with pytest.raises(TargetError) as refused, new_directory(target):
        raise OSError(code, os.strerror(code), str(target.parent))
    assert str(refused.value) == f"cannot write {target}: {advice.format(folder=target.parent)}"
    assert left_in_room(target) == []


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="there is no /proc here, in which nothing can be made"
)
@pytest.mark.parametrize("name", ["model", "made/model"])
def test_a_folder_in_which_nothing_can_be_made_is_named(name):
    for way in (new_directory, alone):
        with pytest.raises(TargetError) as refused, way(Path("/proc") / name):
            pass
        assert (
            str(refused.value)
            == f"cannot write /proc/{name}: nothing can be made in /proc; choose another place"
        )


def test_another_error_of_the_system_is_passed_on(target):
    with pytest.raises(FileNotFoundError, match="no-such-file"), new_directory(target) as directory:
        (directory / "no-such-file").read_text()
    assert left_in_room(target) == []


# Disks that are full or read-only


def test_a_file_size_limit_is_explained_and_leaves_nothing(checkpoint_dir, target, in_child):
    child = in_child(f"""
        import resource, signal
        import otaro
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        try:
            otaro.pack({str(checkpoint_dir)!r}, {str(target)!r})
        except otaro.OtaroError as error:
            print(type(error).__name__, error)
        """)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(
        f"TargetError cannot write {target}: the file would be larger than this system allows"
    )
    assert left_in_room(target) == []


@pytest.mark.parametrize("size", ["16k", "100k", "200k"])
def test_a_full_disk_is_explained_and_leaves_nothing(checkpoint_dir, mounted, size):
    room, begun = mounted(f"size={size}"), []  # the packed model takes some 220 kB
    with pytest.raises(TargetError, match=f"cannot write {room}/model: the disk is full; free some space"):
        otaro.pack(checkpoint_dir, room / "model", progress=lambda *call: begun.append(call))
    assert list(room.iterdir()) == []
    assert begun == []  # it shows at once, not after an hour of encoding


def test_a_full_disk_leaves_the_old_model_as_it_was(make_checkpoint, mounted):
    room = mounted("size=400k")
    otaro.pack(make_checkpoint("llama"), room / "model")
    with pytest.raises(TargetError, match="the disk is full"):
        otaro.pack(make_checkpoint("llama"), room / "model", reconstruction="truncate", overwrite=True)
    assert [path.name for path in room.iterdir()] == ["model"]
    nested = NestedDirectory(room / "model")
    assert nested.schema.reconstruction == "midpoint"
    nested.verify()


def test_a_read_only_file_system_is_explained(checkpoint_dir, mounted):
    room = mounted("ro")
    with pytest.raises(
        TargetError, match=f"cannot write {room}/model: the file system of {room} is read-only"
    ):
        otaro.pack(checkpoint_dir, room / "model")


def test_a_directory_one_may_not_write_to_is_explained(in_child):
    with tempfile.TemporaryDirectory() as room:  # pytest's own directories are hidden from other users
        Path(room).chmod(0o555)
        child = in_child(f"""
            import os
            from pathlib import Path
            import otaro
            from otaro.file.atomic import alone, new_directory
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write everywhere
            for name, way in [("model", new_directory), ("made/model", new_directory), ("run", alone)]:
                try:
                    with way(Path({room!r}) / name):
                        print("went on")
                except otaro.OtaroError as error:
                    print(type(error).__name__, error)
            """)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [
        f"TargetError cannot write {room}/{name}: you may not write in {room}; choose another place"
        for name in ("model", "made/model", "run")
    ]


# kill -9

# Where a packing process dies: the code runs in it before packing starts. `die_at(owner, name, n)` kills at
# the n-th call.
DEATHS = {
    "at the first tensor": "die_at(pack_module, 'encode', 1)",
    "at a later tensor": "die_at(pack_module, 'encode', 7)",
    "at the first write": "die_at(io._ShardWriter, 'append', 1)",
    "at a later write": "die_at(io._ShardWriter, 'append', 50)",
    "beside the tokenizer": "die_at(pack_module, '_write_sidecars', 1)",
    "at the first header": "die_at(io._ShardWriter, 'close', 1)",
    "at the last header": "die_at(io._ShardWriter, 'close', 6)",
    "before flushing": "die_at(atomic, 'flush', 1)",
    "while flushing": "die_at(os, 'fsync', 3)",
    "before moving": "die_at(atomic, '_move_into_place', 1)",
    "after moving": "die_at(atomic, '_remove', 2)",  # the first call sweeps what an earlier writer left
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("before", [None, "truncate"], ids=["no target", "old target"])
def test_a_killed_process_leaves_the_old_or_the_new_and_the_next_one_cleans_up(
    checkpoint_dir, make_nested, target, copy_of, in_child, before, death
):
    if before:
        copy_of(make_nested("llama", before)).rename(target)
    child = in_child(f"""
        import os, signal
        import otaro
        from otaro.file import atomic, io
        from otaro.file import pack as pack_module

        def die_at(owner, name, count):
            calls, original = [], getattr(owner, name)
            def counted(*args, **kwargs):
                calls.append(name)
                if len(calls) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)
            setattr(owner, name, counted)

        {DEATHS[death]}
        pack_module.pack({str(checkpoint_dir)!r}, {str(target)!r}, overwrite=True)
        """)
    assert child.returncode == -signal.SIGKILL, child.stderr
    expected = "midpoint" if death == "after moving" else before
    assert target.exists() == (expected is not None)
    if expected:
        nested = NestedDirectory(target)
        assert nested.schema.reconstruction == expected
        # A description is written after all of it.
        assert {path.name for path in target.iterdir()} | {"decoder.json"} == {
            path.name for path in make_nested("llama").iterdir()
        }
        nested.verify()

    otaro.pack(checkpoint_dir, target, overwrite=True)
    assert left_in_room(target) == ["model"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in make_nested("llama").iterdir()
    }


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_text(tmp_path / "new" / "file.json", "first")
    (tmp_path / "new" / ".file.json.partial").write_text("of a writer that was killed")
    write_text(tmp_path / "new" / "file.json", "second")
    assert (tmp_path / "new" / "file.json").read_text() == "second"

    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TargetError, match="the disk is full"):
        write_text(tmp_path / "new" / "file.json", "third")
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ["second"]


def put(target, data, error=None, **options):
    with new_file(target, **options) as partial:
        partial.write_bytes(data)
        if error is not None:
            raise error


def test_a_large_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "large"
    with pytest.raises(KeyboardInterrupt):
        put(target, b"half", KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    put(target, b"whole")
    with pytest.raises(TargetError, match=r"large exists; choose another place"):
        put(target, b"other")
    with pytest.raises(ValueError, match="no"):
        put(target, b"other", ValueError("no"), overwrite=True)
    assert target.read_bytes() == b"whole"
    put(target, b"new", overwrite=True)
    assert target.read_bytes() == b"new"
    with pytest.raises(TargetError, match=r"is a directory; choose another place"):
        put(tmp_path, b"other")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
