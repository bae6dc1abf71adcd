import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import otaro
from otaro.cli import doctor
from otaro.cli.main import app
from otaro.errors import install, pip_install
from otaro.kernels import cpu, ops, reference


def asked(*words):
    result = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_it_says_which_kernels_and_why_versions_threads_and_gpu():
    found = json.loads(asked("--json").stdout)
    assert found["versions"]["otaro"] == otaro.__version__
    assert found["versions"]["torch"] == torch.__version__
    name, reason = ops.backend("cpu")
    assert found["kernels"]["cpu"] == {"name": name, "reason": reason}
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert bool(found["gpu"]["names"]) == torch.cuda.is_available() != bool(found["gpu"]["reason"])
    shown = asked()
    assert shown.exit_code == 0
    assert f"{name}: {reason}" in shown.stdout
    assert "nothing is broken" in shown.stdout


def test_kernels_that_were_asked_for_and_cannot_be_are_broken(monkeypatch):
    monkeypatch.setenv("OTARO_KERNELS", "abacus")
    shown = asked()
    assert shown.exit_code == 1
    assert "broken: OTARO_KERNELS=abacus is none of reference" in shown.stdout
    monkeypatch.setenv("OTARO_KERNELS", "reference")
    assert json.loads(asked("--json").stdout)["kernels"]["cpu"] == {
        "name": "reference",
        "reason": "OTARO_KERNELS=reference",
    }


def test_an_extension_that_was_not_built_is_no_fault_and_is_explained(monkeypatch):
    monkeypatch.setattr(cpu, "MISSING", "the C++ extension is not there")
    monkeypatch.setattr(cpu, "_cpu", None)
    shown = asked()
    assert shown.exit_code == 0
    assert "the C++ extension is not there" in shown.stdout


def test_wrong_bits_are_broken(monkeypatch):
    honest = reference.linear
    monkeypatch.setattr(reference, "linear", lambda x, packed: honest(x, packed) + 1)
    monkeypatch.setenv("OTARO_KERNELS", "cpu:portable" if cpu.available() else "reference")
    if not cpu.available():
        pytest.skip("the reference is all there is, and agrees with itself")
    shown = asked()
    assert shown.exit_code == 1
    assert "computed other bits than the reference" in shown.stdout


def test_a_missing_extra_comes_with_its_pip_line_and_a_missing_dependency_is_broken(monkeypatch):
    lines = ["torch>=2", "abacus>=1", "torch>=99; extra == 'lora'", "rich>=1; extra == 'report'"]
    lines += ["abacus>=1; extra == 'mlx'", "abacus>=1; platform_system == 'Plan 9' and extra == 'eval'"]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    found = json.loads(asked("--json").stdout)
    assert found["problems"] == ["abacus is missing; install otaro again"]
    lacking = {name: one["missing"] for name, one in found["extras"].items()}
    old = f"torch is {metadata.version('torch')}, and >=99 is needed"
    none = dict.fromkeys(doctor.EXTRAS)
    assert lacking == none | {"lora": [old], "report": [], "mlx": ["abacus is missing"], "eval": []}
    shown = asked().stdout
    assert f"abacus is missing: {install('mlx')}" in shown
    assert "the figures of otaro analyze: installed" in shown
    assert f"otaro serve: this installation is older than it: {install('serve')}" in shown


class Installed:
    def __init__(self, version, origin=None):
        self.version, self.origin = version, origin

    def read_text(self, name):
        return self.origin if name == "direct_url.json" else None


@pytest.mark.parametrize(
    ("origin", "how"),
    [
        (None, "--upgrade otaro-llm"),
        ('{"url": "file:///srv/a%20folder", "dir_info": {"editable": true}}', "-e '/srv/a folder'"),
        ('{"url": "https://example.com/otaro.whl"}', "--upgrade otaro-llm"),
    ],
)
def test_an_installation_older_than_the_code_is_a_warning_and_not_broken(monkeypatch, origin, how):
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed("0.0.9", origin))
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2"])
    monkeypatch.setattr(metadata, "version", lambda _: "3.0")
    shown = asked()
    assert shown.exit_code == 0
    assert (
        f"installed as 0.0.9, code is {otaro.__version__}: install again with {pip_install(how)}"
        in shown.stdout
    )
    assert all(f"[{name}]" in shown.stdout for name in doctor.EXTRAS)


def test_an_installation_of_this_very_code_has_no_warning(monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(otaro.__version__))
    assert doctor._outdated() == []


def test_every_extra_has_its_words():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev"}
