"""The benchmarks of the server run, and what they say of a small one is true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def decisions():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_decisions
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_decisions


def test_the_margin_is_the_smallest_that_leaves_so_many_alike(decisions):
    def made(answers, margins):
        return [decisions.Made(answer, margin, "", 0.0) for answer, margin in zip(answers, margins, strict=True)]

    coarse = made("abab", [0.1, 0.4, 0.2, 0.9])
    assert decisions.smallest_margin(coarse, made("abab", [1] * 4), 1.0) == 0.1  # nothing has to be asked again
    assert decisions.smallest_margin(coarse, made("abbb", [1] * 4), 1.0) == 0.4
    assert decisions.smallest_margin(coarse, made("abbb", [1] * 4), 0.75) == 0.1
    assert decisions.smallest_margin(coarse, made("abaa", [1] * 4), 1.0) == 1.0


@pytest.mark.slow
def test_a_short_load_has_no_error_and_no_answer_that_differs(tmp_path):
    run = [sys.executable, "-m", "otaro", "pack", "builtin", str(tmp_path / "tiny")]
    subprocess.run(run, check=True, capture_output=True)
    command = [
        sys.executable,
        BENCHMARKS / "bench_serve.py",
        tmp_path / "tiny",
        "--clients",
        "4",
        "--seconds",
        "4",
        "--cases",
        "12",
    ]
    done = subprocess.run(
        [*map(str, command), "--tokens", "16", "--words", "5,20"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (ours,) = json.loads(done.stdout.splitlines()[-1])["servers"]
    assert (ours["errors"], ours["different"]) == (0, 0)
    assert ours["answers"] >= 4
    assert set(ours["first_token"]) <= {f"E5M{bits}" for bits in range(3, 9)}
