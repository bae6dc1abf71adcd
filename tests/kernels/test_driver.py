"""The driver that tests kernels where there is no Python, here: with portable ones, on this CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .cases import write_all

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src/otaro/kernels/csrc"
SOURCES = [CSRC / f"{name}.cpp" for name in ("decoder", "pool", "portable", "select")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    if not (compiler := shutil.which("c++")):
        pytest.skip("there is no C++ compiler")
    program = tmp_path_factory.mktemp("driver") / "driver"
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-Wno-psabi",
        f"-I{CSRC}",
        f"-I{CSRC.parent / 'shared'}",
        "-pthread",
    ]
    subprocess.run(
        [compiler, *flags, *SOURCES, Path(__file__).with_name("driver.cpp"), "-o", program], check=True
    )
    return program


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "cases.bin"
    assert write_all(path, few=True) > 50
    return path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_reference_s_cases_pass_and_floats_are_those_of_every_other_cpu(driver, cases):
    got = run(driver, cases)
    assert got.returncode == 0, got.stderr
    assert got.stdout.splitlines()[-1] == Path(__file__).with_name("driver.digest").read_text().strip()


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9], ids=str)
def test_a_case_with_one_wrong_byte_fails(driver, cases, at, tmp_path):
    """Or the driver would compare nothing. Every part of a case is an input or what is expected of it."""
    data = bytearray(cases.read_bytes())
    data[int(len(data) * at)] ^= 0x40
    (wrong := tmp_path / "wrong.bin").write_bytes(data)
    got = run(driver, wrong)
    assert got.returncode != 0
    assert "case" in got.stderr or "cases" in got.stderr


REFUSALS = {
    (): "usage",
    ("nowhere.bin",): "cannot read",
    ("/dev/null",): "no cases",
    ("/dev/null", "sse9"): "no such instructions",
}


@pytest.mark.parametrize("arguments", REFUSALS, ids=str)
def test_what_it_cannot_do_it_says(driver, arguments):
    got = run(driver, *arguments)
    assert got.returncode == 1
    assert REFUSALS[arguments] in got.stderr
