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
    model = str(models / job.model)
    sizes = {
        "--batches": job.batches,
        "--batch-size": job.batch_size,
        "--sequence-length": job.sequence_length,
    }
    # as in `work`: as published
    flags = [*(str(word) for pair in sizes.items() for word in pair), "--no-bos"]
    with tempfile.TemporaryDirectory() as folder:
        reading = ["--out", folder, "--reconstruction", job.reconstruction]
        for words in (
            ["weights", model, *reading],
            ["gradients", model, "--text", str(text), *reading, *flags, "--device", device],
        ):
            command = [sys.executable, "-c", "from otaro.cli.main import main; main()", "analyze", *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-500:])
        weights, gradients = (
            json.loads(Path(folder, f"{kind}.json").read_text()) for kind in ("weights", "gradients")
        )
    errors = {name: sum(map(abs, each)) / len(each) for name, each in gradients["norm_error"].items()}
    fit = {
        name: {part: each[part] for part in ("x", "y_share", "y_bias")}
        for name, each in gradients["fit"].items()
    }
    noise = {
        name: {part: each[part] for part in ("n", "ratio", "exponent")}
        for name, each in gradients["noise"].items()
    }
    shares = {m["module"]: m["by_group_size"]["64"]["outlier_groups"] for m in weights["modules"]}
    found = {
        "modules": [
            {part: module[part] for part in ("layer", "projection", "to_fp")}
            for module in gradients["modules"]
        ],
        "overall": gradients["overall"],
        "to_fp": gradients["to_fp"],
        "norm_error": errors,
        "fit": fit,
        "noise": noise,
        "weights": weights["overall"],
        "most_outliers": dict(sorted(shares.items(), key=lambda pair: -(pair[1] or 0.0))[:5]),
    }
    stated = (
        f"otaro analyze gradients models/{job.model} --text valid.txt --reconstruction {job.reconstruction} "
    )
    line = {
        "key": job.key,
        "bench": "observe",
        "name": f"{job.model}, {job.reconstruction}",
        "settings": job.settings(),
    }
    # The file is kept, so its numbers have five significant digits.
    shortened: dict[str, Any] = json.loads(
        json.dumps(found), parse_float=lambda number: float(f"{float(number):.5g}")
    )
    return line | {"command": stated + " ".join(flags)} | shortened
