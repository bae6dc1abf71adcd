"""Part 4 of the study: `otaro analyze` on every layer of a model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runs.study.plan import Observation


def observe(job: Observation, models: Path, text: Path, device: str) -> dict[str, Any]:
    """Run `otaro analyze` and keep what the tables need of its files."""
    model, how = str(models / job.model), job.reconstruction
    sizes = f"--batches {job.batches} --batch-size {job.batch_size} --sequence-length {job.sequence_length}"
    flags = f"{sizes} --no-bos".split()  # as in `work`: as published
    read = {"weights": [], "gradients": ["--text", str(text), *flags, "--device", device]}
    with tempfile.TemporaryDirectory() as folder:
        for kind, more in read.items():
            command = [sys.executable, "-c", "from otaro.cli.main import main; main()", "analyze", kind]
            command += [model, "--out", folder, "--reconstruction", how, *more]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-500:])
        weights, gradients = (json.loads(Path(folder, f"{kind}.json").read_text()) for kind in read)

    def parts(each: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: each[name] for name in names}

    errors, fit, noise = (gradients[name].items() for name in ("norm_error", "fit", "noise"))
    shares = {m["module"]: m["by_group_size"]["64"]["outlier_groups"] for m in weights["modules"]}
    found = {
        "modules": [parts(module, "layer", "projection", "to_fp") for module in gradients["modules"]],
        "overall": gradients["overall"],
        "to_fp": gradients["to_fp"],
        "norm_error": {name: sum(map(abs, each)) / len(each) for name, each in errors},
        "fit": {name: parts(each, "x", "y_share", "y_bias") for name, each in fit},
        "noise": {name: parts(each, "n", "ratio", "exponent") for name, each in noise},
        "weights": weights["overall"],
        "most_outliers": dict(sorted(shares.items(), key=lambda pair: -(pair[1] or 0.0))[:5]),
    }
    stated = f"otaro analyze gradients models/{job.model} --text valid.txt --reconstruction {how}"
    line = {"key": job.key, "bench": "observe", "name": f"{job.model}, {how}", "settings": job.settings()}
    # The file is kept, so its numbers have five significant digits.
    shortened = json.loads(json.dumps(found), parse_float=lambda number: float(f"{float(number):.5g}"))
    return line | {"command": f"{stated} {' '.join(flags)}", **shortened}
