"""The command line of the study; runs/study.sh calls it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runs.study.plan import Job
    from runs.study.work import Places

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "study.jsonl"
DOCS = ROOT / "docs"


def main() -> None:
    a = arguments().parse_args()
    if a.report:
        from runs.study.report import write

        print(*write(a.results, DOCS), sep="\n")
        return

    import torch

    from runs.study import plan, work
    from runs.study.results import finished, is_done, read

    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = work.Places(a.models, a.data, a.results, a.commit or commit(), device)
    if a.export:
        export(places)
        return
    blocks = chosen(plan.blocks(), a.only)
    if a.list:
        show(blocks, places)
        return
    jobs = [job for block in blocks.values() for job in block]
    done = finished(read(places.results))
    check([job for job in jobs if not is_done(job, done)], places)
    failed = start_workers(jobs, places, a.workers, a.minutes)
    show(blocks, places)
    if failed:
        sys.exit(f"error: {failed} of {a.workers} workers gave up, as told above; what they finished is kept")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runs/study.sh",
        description="Run the study of docs/results.md, or what is missing of it.",
        epilog="Needs models from runs/get_smollm2.sh and runs/get_stories15m.sh, --data, and for the tasks "
        "what --export writes; rows of the demo need none of them. What it costs is told in CONTRIBUTING.md.",
    )
    do, add = parser.add_mutually_exclusive_group(), parser.add_argument
    for name, what in {
        "--list": "say what is done and what is missing, and stop",
        "--report": "write the tables and figures of docs/ from the results, and stop",
        "--export": "write the zero-shot requests (needs lm-eval), and stop",
    }.items():
        do.add_argument(name, action="store_true", help=what)
    data = "folder with wikitext-2/{valid,test}.txt, alpaca/alpaca_5000.json, zeroshot/"
    add("--data", type=Path, help=data)
    add("--models", type=Path, default=ROOT / "models", help="folder of the models (default: models)")
    add("--results", type=Path, default=COMMITTED, help="a .jsonl file that rows are added to")
    only = "rows whose name matches, such as 'stories15M: best*'"
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help=only)
    add("--workers", type=_positive, default=1, help="processes side by side (fourteen suit an H200)")
    add("--minutes", type=float, help="start no row that would end later than this")
    add("--commit", help="what rows say they were made with (default: that of the checkout)")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of one or more")
    return int(text)


def commit() -> str:
    """Of the checkout; with a mark if it was changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def chosen(blocks: Mapping[str, Sequence[Job]], patterns: Sequence[str]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for name, jobs in blocks.items():
        if matching := [job for job in jobs if any(fnmatchcase(job.key, one) for one in patterns)]:
            found[name] = matching
    if not found:
        sys.exit(f"error: no row matches --only {' '.join(patterns)}; --list names them all")
    return found


def show(blocks: Mapping[str, Sequence[Job]], places: Places) -> None:
    """Every row, what each block lacks, and what that would take of a GPU."""
    from runs.study.plan import cost
    from runs.study.results import finished, is_done, read

    done = finished(read(places.results))
    rows, missing, seconds = 0, 0, 0.0
    for name, jobs in blocks.items():
        absent = [job for job in jobs if not is_done(job, done)]
        print(f"{name}:")
        for job in jobs:
            print(f"  {'missing' if job in absent else 'done   '} {job.key}")
        takes = sum(map(cost, absent))
        rows, missing, seconds = rows + len(jobs), missing + len(absent), seconds + takes
        of = f"{len(jobs) - len(absent)} done, {len(absent)} missing"
        print(f"  {of}: about {takes / 60:.1f} minutes of an H200, {seconds / 60:.1f} up to here\n")
    print(f"{rows - missing} done, {missing} missing")


def check(jobs: Sequence[Job], places: Places) -> None:
    """Say what is not there before anything starts."""
    from runs.study.plan import BENCHES, Row

    rows = [job for job in jobs if isinstance(job, Row)]
    used = [BENCHES[row.bench] for row in rows]
    models = {bench.model for bench in used} | {job.model for job in jobs if not isinstance(job, Row)}
    wanted = [places.models / model / "config.json" for model in sorted(models - {"moe", "builtin"})]
    data = {bench.data for bench in used}
    if "wikitext" in data or len(rows) < len(jobs):
        wanted += [places.file("wikitext-2/valid.txt"), places.file("wikitext-2/test.txt")]
    if "alpaca" in data or "moe" in models:  # it learns instructions
        wanted.append(places.file("alpaca/alpaca_5000.json"))
    wanted += {places.questions(BENCHES[row.bench].model) for row in rows if "zeroshot" in row.measures}
    if absent := [str(path) for path in wanted if not path.is_file()]:
        sys.exit(f"error: missing: {', '.join(absent)}; --help tells where they come from")


def start_workers(jobs: Sequence[Job], places: Places, count: int, minutes: float | None) -> int:
    """Start them, and wait; how many failed."""
    from runs.study import work

    cores = os.cpu_count() or 1
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, 2 * cores // count)))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    small_first = sorted(jobs, key=lambda job: job.key.startswith(("SmolLM2", "observe")))
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for number in range(count):
            order = small_first if number % 5 in (0, 2) else jobs  # small models have queues of their own
            asked = (order, places, Path(folder), deadline, f"[{number}]")
            workers.append(multiprocessing.get_context("spawn").Process(target=work.work, args=asked))
            workers[-1].start()
        for worker in workers:
            worker.join()
    return sum(worker.exitcode != 0 for worker in workers)


def export(places: Places) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from otaro.builtin import MODEL_DIR
    from otaro.evaluate.harness import PAPER_TASKS
    from runs.study import zeroshot

    name = "SmolLM2-135M"
    tokenizer = AutoTokenizer.from_pretrained(places.models / name)
    any_model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    questions = zeroshot.export(list(PAPER_TASKS), places.file("zeroshot"), tokenizer, any_model)
    out = places.questions(name)
    zeroshot.save(questions, out)
    print(f"{out}: {sum(map(len, questions.values())):,} questions, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
