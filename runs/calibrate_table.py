"""What `otaro pack --calibrate` gives without tuning: perplexity of plain and calibrated packing, and which bars hold.

    python runs/calibrate_table.py models/SmolLM2-135M --calibrate wikitext-2/valid.txt --test wikitext-2/test.txt --device cuda

The text to calibrate on is cut into `--parts` parts, each of which makes a model from 128 windows of 512 tokens; nothing is
measured on it. Results are kept (`quality.json` in the models' folders under `--work`), so that a second call goes on. The
bars: at E5M3 30% and at E5M4 50% of the way from plain packing to full precision, at E5M6 to E5M8 no more than 0.3% worse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PRECISIONS = ("E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3")
WAY = {"E5M3": 0.30, "E5M4": 0.50}
WORSE = {"E5M8": 0.003, "E5M7": 0.003, "E5M6": 0.003}


def otaro(*words: str | Path) -> str:
    done = subprocess.run([sys.executable, "-m", "otaro", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def perplexities(model: Path, precisions: tuple[str, ...], arguments: argparse.Namespace, out: Path) -> dict[str, float]:
    options = ["--precision", ",".join(precisions), "--device", arguments.device, "--out", out, "--json"]
    options += ["--window", arguments.window] if arguments.window else []
    entries = json.loads(otaro("eval", model, "--text", arguments.test, *options))["entries"]
    return {entry["precision"]: entry["value"] for entry in entries if entry["kind"] == "perplexity"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of plain and calibrated packing.")
    parser.add_argument("model", type=Path, help="a checkpoint")
    parser.add_argument("--calibrate", type=Path, required=True, help="the text to calibrate on")
    parser.add_argument("--test", type=Path, required=True, help="the text to measure on")
    parser.add_argument("--parts", type=int, default=3, help="models to make, each from a part of the text")
    parser.add_argument("--samples", type=int, default=128, help="windows of 512 tokens for each")
    parser.add_argument("--window", type=int, default=None, help="of the measurement; by default as otaro eval chooses")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("models/calibrated"), help="where models and results go")
    arguments = parser.parse_args()
    content = arguments.calibrate.read_text()
    size = len(content) // arguments.parts
    work = arguments.work / arguments.model.name
    (work / "plain").mkdir(parents=True, exist_ok=True)
    plain = perplexities(arguments.model, ("fp", *PRECISIONS), arguments, work / "plain")
    rows, seconds = {}, {}
    for part in range(arguments.parts):
        text, out = work / f"part-{part}.txt", work / f"calibrated-{part}"
        text.write_text(content[part * size : (part + 1) * size])
        started = time.perf_counter()
        if not out.exists():
            otaro(
                "pack", arguments.model, out, "--calibrate", text, "--samples", arguments.samples, "--device", arguments.device
            )
            seconds[part] = time.perf_counter() - started
        rows[part] = perplexities(out, PRECISIONS, arguments, out)
    print(f"{'':14}" + "".join(f"{precision:>10}" for precision in PRECISIONS))
    print(f"{'plain':14}" + "".join(f"{plain[precision]:10.3f}" for precision in PRECISIONS) + f"   full {plain['fp']:.3f}")
    for part, row in rows.items():
        print(f"{f'calibrated {part}':14}" + "".join(f"{row[precision]:10.3f}" for precision in PRECISIONS))
    failed = []
    for part, row in rows.items():
        for precision, least in WAY.items():
            way = (plain[precision] - row[precision]) / (plain[precision] - plain["fp"])
            print(f"part {part} {precision}: {way:6.1%} of the way, {least:.0%} asked")
            failed += [] if way >= least else [f"{part} {precision}"]
        for precision, most in WORSE.items():
            worse = row[precision] / plain[precision] - 1
            print(f"part {part} {precision}: {worse:+6.2%}, {most:+.1%} allowed")
            failed += [] if worse <= most else [f"{part} {precision}"]
    print("all bars hold" if not failed else f"missed: {', '.join(failed)}")
    print(json.dumps({"model": arguments.model.name, "plain": plain, "calibrated": rows, "seconds": seconds, "missed": failed}))


if __name__ == "__main__":
    main()
