"""`otaro doctor`: what was found on this machine, why, and what is missing."""

from __future__ import annotations

import json as json_module
import os
import platform
import shlex
from importlib import metadata
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import typer

from otaro.cli import console
from otaro.cli.help import page
from otaro.errors import DISTRIBUTION, KernelError, install, pip_install

PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "huggingface_hub")
EXTRAS = {
    "report": "otaro report, the figures of otaro analyze",
    "serve": "otaro serve",
    "data": "parquet files and Hub data sets",
    "eval": "otaro eval --tasks",
    "lora": "otaro tune --lora",
    "adam8bit": "otaro tune --optimizer adamw8bit",
    "gguf": "otaro export --to gguf",
    "llama": "otaro bench --against llama.cpp",
    "web": "otaro web",
    "mlx": "checks of otaro export --to mlx",
}
"""What each of them is for."""
VARIABLES = ("OTARO_KERNELS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE")


@page(examples="otaro doctor --json | jq .kernels")
def doctor(json: console.JsonOption = False) -> None:
    """Say what was found on this machine, and what is broken: versions, kernels and why these, threads, GPU,
    extras.

    Kernels in use are also asked for a product, which must have the bits of the reference. Exits with 1 if
    something is broken.
    """
    found = examine()
    if json:
        console.print_json(found)
    else:
        _show(found)
    raise typer.Exit(bool(found["problems"]))


def examine() -> dict[str, Any]:
    """All of it, as JSON can hold it."""
    import torch

    import otaro
    from otaro.evaluate.machine import cpu_name
    from otaro.kernels import cpu

    problems: list[str] = []
    kernels = {
        device: _kernels(device, problems)
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
    }
    extras = {name: _lacking(name) for name in EXTRAS}
    problems += [f"{what}; install otaro again" for what in _lacking("") or []]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"otaro": otaro.__version__, "python": platform.python_version()}
    return {
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
        "system": platform.platform(),
        "cpu": {
            "name": cpu_name(),
            "cores": usable,
            "threads": torch.get_num_threads(),
            "instructions": cpu.available(),
        },
        "extension": {"built": not cpu.MISSING, "reason": cpu.MISSING},
        "kernels": kernels,
        "gpu": _gpu(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "extras": {name: {"for": EXTRAS[name], "missing": lacking} for name, lacking in extras.items()},
        "warnings": _outdated(),
        "problems": problems,
    }


def _outdated() -> list[str]:
    """What to do where this code is another version than was installed: its extras are of then."""
    import otaro

    installed = metadata.distribution(DISTRIBUTION)
    if installed.version == otaro.__version__:
        return []
    origin = json_module.loads(installed.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    how = (
        shlex.join(["-e", url2pathname(urlparse(origin["url"]).path)])
        if editable
        else f"--upgrade {DISTRIBUTION}"
    )
    again = f"install again with {pip_install(how)}"
    return [f"installed as {installed.version}, code is {otaro.__version__}: {again}"]


def _kernels(device: str, problems: list[str]) -> dict[str, str] | None:
    """Those in use, and why; None where they cannot be used."""
    from otaro.kernels import ops

    try:
        name, reason = ops.backend(device)
        if not _right(device):
            problems.append(
                f"kernels {name} computed other bits than the reference; {ops.OVERRIDE}=reference does "
                "without them"
            )
    except KernelError as error:
        problems.append(str(error))
        return None
    return {"name": name, "reason": reason}


def _right(device: str) -> bool:
    """Whether a small product at E5M8 has the bits of the reference."""
    import torch

    from otaro.file.planes import BASE_BYTES, PLANE_BYTES, PLANES
    from otaro.kernels import ops, reference
    from otaro.kernels.packed import Packed

    def some(columns: int) -> torch.Tensor:
        return (torch.arange(8 * columns) * 37 % 251).to(torch.uint8).reshape(8, columns)

    x = torch.linspace(-1, 1, 64).reshape(1, 64)
    weight = Packed(
        some(2 * BASE_BYTES), some(1) % 100, [some(2 * PLANE_BYTES) for _ in PLANES], 64, 64, False, 0
    )
    moved = weight._replace(
        base=weight.base.to(device),
        scales=weight.scales.to(device),
        planes=[plane.to(device) for plane in weight.planes],
    )
    return torch.equal(ops.linear(x.to(device), *moved).cpu(), reference.linear(x, weight))


def _gpu() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return {"names": names, "reason": ""}
    if torch.version.cuda is None:
        return {"names": [], "reason": f"torch {torch.__version__} is built without CUDA"}
    return {"names": [], "reason": "torch is built with CUDA, and sees no GPU: there is none, or no driver"}


def _lacking(extra: str) -> list[str] | None:
    """What an extra asks for and is missing, too old or too new; "" is what all need. None: unknown here."""
    from packaging.requirements import Requirement

    asked = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    mark = f'extra == "{extra}"' if extra else "extra =="
    asked = [one for one in asked if (mark in str(one.marker)) == bool(extra)]
    if not asked:
        return None
    lacking = []
    for one in asked:
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue  # is for other systems
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{one.name} is missing")
        else:
            if not one.specifier.contains(version, prereleases=True):
                lacking.append(f"{one.name} is {version}, and {one.specifier} is needed")
    return lacking


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    versions, cpu, gpu = found["versions"], found["cpu"], found["gpu"]
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("system", found["system"]),
    ]
    rows.append(("CPU", f"{cpu['name']}; {cpu['threads']} threads on {cpu['cores']} cores"))
    for device, kernels in found["kernels"].items():
        rows.append(
            (
                f"kernels, {device}",
                f"{kernels['name']}: {kernels['reason']}" if kernels else "none can be used",
            )
        )
    able = ", ".join(cpu["instructions"])
    rows.append(
        (
            "extension",
            f"built; this CPU can run {able}"
            if found["extension"]["built"]
            else found["extension"]["reason"],
        )
    )
    rows.append(("GPU", ", ".join(gpu["names"]) or f"none: {gpu['reason']}"))
    rows += [(name, f"{value} (environment)") for name, value in found["environment"].items()]
    for name, value in rows:
        table.add_row(name, console.escape(value))
    for name, one in found["extras"].items():
        lacking = ["this installation is older than it"] if one["missing"] is None else one["missing"]
        told = (
            f"[dim]{'; '.join(lacking)}:[/] {console.escape(install(name))}"
            if lacking
            else "[green]installed[/]"
        )
        table.add_row(f"\\[{name}]", f"{one['for']}: {told}")
    console.out.print(table, highlight=False)
    for warning in found["warnings"]:
        console.out.print(f"[bold yellow]warning:[/] {console.escape(warning)}", highlight=False)
    for problem in found["problems"]:
        console.out.print(f"[bold red]broken:[/] {console.escape(problem)}", highlight=False)
    if not found["problems"]:
        console.out.print("[green]nothing is broken[/]")
