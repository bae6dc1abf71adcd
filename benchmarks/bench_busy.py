"""What another busy process costs the commands, by how OpenMP's threads wait for each other.

    python benchmarks/bench_busy.py [--rounds 3] [--neighbours 0,1] [--only pack,eval]

Between two pieces of parallel work a thread of OpenMP waits for the next one by spinning, or asleep. Spinning saves the
microseconds of waking up. But where another process has one of the cores, the thread that all others wait for is not
running, and they spin its time away. `otaro` therefore has them wait asleep (`cli/main.py`). Each command is run as a user
would run it, with nobody else on the machine and beside busy processes, in turns; variables that are set already win over
what the command sets, which is how the contenders differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import SMOLLM2, finish

WAITING = {
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # what libgomp does of itself
    "as the commands set it": {},
}
COMMANDS = {
    "pack": ["pack", "{model}", "{scratch}/packed", "--overwrite"],
    "eval": ["eval", "{nested}", "--text", "builtin", "--precision", "E5M4", "--window", "256", "--again"],
    "tune": ["tune", "builtin", "--data", "builtin", "--out", "{scratch}/run{n}", "--steps", "10", "--eval-tokens", "1024"],
    "generate": ["generate", "{nested}", "--prompt", "The statement", "--max-new-tokens", "64"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", default="0,1", help="how many other processes keep a core busy")
    parser.add_argument("--only", default=",".join(COMMANDS))
    args = parser.parse_args()
    model = str(SMOLLM2) if SMOLLM2.is_dir() else "builtin"
    counts = [int(count) for count in args.neighbours.split(",")]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        places = {"model": model, "scratch": scratch, "nested": f"{scratch}/nested"}
        otaro(["pack", "builtin", places["nested"]], {})
        for round_ in range(args.rounds):
            for command in args.only.split(","):
                for neighbours in counts:
                    for waiting, variables in WAITING.items():
                        place = {**places, "n": f"{round_}-{neighbours}-{waiting[0]}"}
                        words = [word.format(**place) for word in COMMANDS[command]]
                        with busy(neighbours):
                            started = time.perf_counter()
                            otaro(words, variables)
                            seconds = time.perf_counter() - started
                        times.setdefault(f"{command}, {neighbours} beside, {waiting}", []).append(seconds)
    print(f"pack of {Path(model).name}, the others on the built-in model; seconds, median of {args.rounds}")
    print(f"{'':12}{'busy processes':>16}" + "".join(f"{waiting:>26}" for waiting in WAITING))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for command in args.only.split(","):
        for neighbours in counts:
            cells = (medians[f"{command}, {neighbours} beside, {waiting}"] for waiting in WAITING)
            print(f"{command:12}{neighbours:>16}" + "".join(f"{seconds:>26.1f}" for seconds in cells))
    result: dict[str, Any] = {"benchmark": "busy", "model": Path(model).name, "rounds": args.rounds, "cores": os.cpu_count()}
    finish({**result, "seconds": medians})


def otaro(words: list[str], variables: dict[str, str]) -> None:
    """Run a command to its end."""
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", "from otaro.cli.main import main; main()", *words]
    subprocess.run(command, env={**others, **variables}, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


if __name__ == "__main__":
    main()
