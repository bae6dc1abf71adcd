"""The benchmark of the server runs, and what it says of a small one is true."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_short_load_has_no_error_and_no_answer_that_differs(tmp_path):
    run = [sys.executable, "-m", "otaro", "pack", "builtin", str(tmp_path / "tiny")]
    subprocess.run(run, check=True, capture_output=True)
    sizes = {"--clients": 4, "--seconds": 4, "--cases": 12, "--tokens": 16}
    words = [
        sys.executable,
        BENCHMARKS / "bench_serve.py",
        tmp_path / "tiny",
        *itertools.chain(*sizes.items()),
    ]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (ours,) = json.loads(done.stdout.splitlines()[-1])["servers"]
    assert (ours["errors"], ours["different"]) == (0, 0)
    assert ours["answers"] >= 4
    assert set(ours["first_token"]) <= {f"E5M{bits}" for bits in range(3, 9)}
