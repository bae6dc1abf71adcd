"""Which backend serves, the reason given, and the override; what happens where the extension is not there."""

from __future__ import annotations

import pytest
import torch

from otaro.errors import KernelError
from otaro.kernels import cpu, ops

from .packed import INSTRUCTIONS, make_activations, make_packed, same_bits, skip_unless_runnable


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(ops.OVERRIDE, raising=False)


def test_the_best_instructions_serve_unless_told_otherwise():
    skip_unless_runnable("portable")
    assert ops.backend() == (f"cpu:{cpu.available()[0]}", "the best that this CPU can run")
    assert cpu.available()[-1] == "portable"
    assert set(cpu.available()) <= set(INSTRUCTIONS)


def test_other_devices_are_served_by_the_reference_and_told_so():
    assert ops.backend("mps") == ("reference", "there are no kernels for mps yet")
    if not torch.cuda.is_available():
        assert ops.backend("cuda") == ("reference", "torch sees no NVIDIA GPU")


@pytest.mark.parametrize("asked", ["reference", "cpu", "cpu:portable"])
def test_the_override_chooses_and_is_the_reason(monkeypatch, asked):
    skip_unless_runnable("portable")
    monkeypatch.setenv(ops.OVERRIDE, asked)
    chosen = f"cpu:{cpu.best()}" if asked == "cpu" else asked
    assert ops.backend() == (chosen, f"{ops.OVERRIDE}={asked}")
    packed, x = make_packed(3, 100, 64), make_activations(2, 100)
    ops.linear(x, *packed)
    if asked != "reference":
        assert cpu._cpu.chosen() == chosen.removeprefix("cpu:")


def test_the_reference_does_not_touch_the_extension(monkeypatch):
    monkeypatch.setenv(ops.OVERRIDE, "reference")
    monkeypatch.setattr(cpu, "_cpu", None)
    packed, x = make_packed(3, 100, 64), make_activations(12, 100)
    assert ops.linear(x, *packed).shape == (12, 3)
    assert ops.decode(*packed, torch.float32).shape == (3, 100)


def test_an_override_for_cpus_leaves_other_devices_to_the_reference(monkeypatch):
    skip_unless_runnable("portable")
    monkeypatch.setenv(ops.OVERRIDE, "cpu:portable")
    assert ops.backend("cuda") == ("reference", f"{ops.OVERRIDE}=cpu:portable does not serve cuda")


@pytest.mark.parametrize("asked", ["nonsense", "CPU", "gpu:fast", ":", "reference:avx2"])
def test_an_unknown_override_is_refused_with_the_known_ones(monkeypatch, asked):
    monkeypatch.setenv(ops.OVERRIDE, asked)
    with pytest.raises(
        KernelError,
        match=rf"^{ops.OVERRIDE}={asked} is none of reference, cpu(, cpu:\w+)*, "
        r"cuda$",
    ):
        ops.backend()
    with pytest.raises(KernelError, match="is none of"):
        ops.linear(torch.ones(1, 100), *make_packed(3, 100, 64))


@pytest.mark.parametrize("asked", ["cpu:sse9", "cpu:avx2 ", "cpu:Portable"])
def test_instructions_that_this_cpu_lacks_are_refused_with_those_it_has(monkeypatch, asked):
    skip_unless_runnable("portable")
    monkeypatch.setenv(ops.OVERRIDE, asked)
    with pytest.raises(KernelError, match=rf"^{ops.OVERRIDE}={asked}, but this CPU can run .*portable only$"):
        ops.backend()


def test_the_extension_knows_no_other_instructions():
    skip_unless_runnable("portable")
    with pytest.raises(ValueError, match="this CPU cannot run 'sse9'"):
        cpu._cpu.choose("sse9")


# sys.modules says None where an import is to fail: what a package without its extension looks like.
WITHOUT = """
    import sys
    sys.modules["otaro.kernels._cpu"] = None
"""


def test_without_the_extension_a_model_generates_the_same_through_the_reference(in_child, nested_dir):
    program = f"""
    import torch, otaro
    from otaro.kernels import ops
    model = otaro.load({str(nested_dir)!r}, "E5M5")
    ids = torch.arange(3, 8).unsqueeze(0)
    print(model.generate(ids, max_new_tokens=6, do_sample=False).tolist())
    print(*ops.backend(), sep=" | ")
    """
    with_it, without = in_child(program), in_child(WITHOUT + program)
    assert without.returncode == 0, without.stderr
    tokens, reason = without.stdout.splitlines()
    assert tokens == with_it.stdout.splitlines()[0]
    assert reason.startswith("reference | the C++ extension is not there (")
    assert reason.endswith("-m pip install --verbose` to see why it was not built")


def test_without_extension_and_compiler_the_message_names_what_is_missing(in_child):
    done = in_child("""
    import os, sys
    sys.modules["otaro.kernels._cpu"] = None
    os.environ["PATH"] = ""
    from otaro.kernels import ops
    print(*ops.backend())
    os.environ["OTARO_KERNELS"] = "cpu"
    try:
        ops.backend()
    except Exception as error:
        print(type(error).__name__, error)
    os.environ["OTARO_KERNELS"] = "nonsense"
    try:
        ops.backend()
    except Exception as error:
        print(type(error).__name__, error)
    """)
    assert done.returncode == 0, done.stderr
    reason, refusal, unknown = done.stdout.splitlines()
    needs = (
        "building it needs a C++ compiler, and none of c++, g++, clang++ is on this machine: install "
        "one, then otaro again"
    )
    assert reason.startswith("reference the C++ extension is not there (")
    assert reason.endswith(needs)
    assert refusal.startswith("KernelError OTARO_KERNELS=cpu, but the C++ extension is not there (")
    assert refusal.endswith(needs)
    assert unknown == "KernelError OTARO_KERNELS=nonsense is none of reference, cpu, cuda"


def test_a_broken_extension_gives_its_own_words(in_child):
    done = in_child("""
    import sys
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "otaro.kernels._cpu":
                raise ImportError("libstdc++.so.6: version `GLIBCXX_9' not found")
    sys.meta_path.insert(0, Broken())
    from otaro.kernels import ops
    print(*ops.backend())
    """)
    assert done.returncode == 0, done.stderr
    assert "(libstdc++.so.6: version `GLIBCXX_9' not found)" in done.stdout


def test_the_choice_can_change_between_two_calls(monkeypatch):
    packed, x = make_packed(5, 300, 64), make_activations(3, 300)
    products = []
    for backend in ("reference", *(f"cpu:{one}" for one in cpu.available()), "reference"):
        monkeypatch.setenv(ops.OVERRIDE, backend)
        products.append(ops.linear(x, *packed))
    assert all(same_bits(product, products[0]) for product in products)
