"""What a model takes: its planes are pages of files that nobody has written to, and little else."""

import json
import sys
from pathlib import Path

import pytest

import otaro
from otaro.kernels import cpu

pytestmark = [
    pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MEASURE = """
import json, re
from pathlib import Path
import torch, otaro

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def shards():
    "Resident and written bytes of every mapped shard."
    found, name = {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = Path(line.split(maxsplit=5)[-1]).name if ".safetensors" in line else None
        elif name and line.startswith(("Rss:", "Private_Dirty:")):
            key, size, _ = line.split()
            sizes = found.setdefault(name, {"Rss:": 0, "Private_Dirty:": 0})
            sizes[key] += 1024 * int(size)
    return found

def generate(model):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.arange(3, 103)[None], **options).tolist()
"""


@pytest.fixture(scope="module")
def hundred_million(random_model, tmp_path_factory) -> Path:
    """A random model of about a hundred million weights, packed."""
    directory = tmp_path_factory.mktemp("large")
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    random_model("llama_tied", **sizes, **heads).save_pretrained(directory / "checkpoint")
    otaro.pack(directory / "checkpoint", directory / "nested")
    return directory / "nested"


def test_a_generation_takes_little_more_than_the_planes_and_the_cache(hundred_million, tiny, in_child):
    """Compared with a process that did the same with the tiny model: imports and code are in its memory."""
    done = in_child(
        MEASURE
        + f"""
generate(otaro.load({str(tiny)!r}, "E5M4"))
before = resident()
model = otaro.load({str(hundred_million)!r}, "E5M4")
generate(model)
print(json.dumps([resident() - before, model.generation.cache_bytes, model.generation.served_by, shards()]))
"""
    )
    assert done.returncode == 0, done.stderr
    growth, cache, served_by, shards = json.loads(done.stdout)
    files = sum((hundred_million / f"model-m{plane}.safetensors").stat().st_size for plane in (3, 4))
    assert served_by == "decoder"
    assert sorted(shards) == ["model-m3.safetensors", "model-m4.safetensors"]
    assert growth <= 1.15 * files + cache


def test_planes_are_clean_pages_of_files_and_trim_gives_them_back(hundred_million, in_child):
    done = in_child(
        MEASURE
        + f"""
model = otaro.load({str(hundred_million)!r}, "E5M8")
said = generate(model)
full = shards()
otaro.set_precision(model, {{"*": "E5M4", "lm_head": "E5M6"}})
dropped = otaro.trim(model)
trimmed = shards()
otaro.set_precision(model, "E5M8")
print(json.dumps([full, dropped, trimmed, generate(model) == said]))
"""
    )
    assert done.returncode == 0, done.stderr
    full, dropped, trimmed, same = json.loads(done.stdout)
    sizes = {plane: (hundred_million / f"model-m{plane}.safetensors").stat().st_size for plane in range(3, 9)}
    for plane, size in sizes.items():
        assert full[f"model-m{plane}.safetensors"]["Private_Dirty:"] == 0
        assert full[f"model-m{plane}.safetensors"]["Rss:"] > 0.95 * size
    head = 32000 * 768 // 8  # bytes of a plane of the head
    assert dropped == pytest.approx(sum(sizes[plane] for plane in range(5, 9)) - 2 * head, rel=0.01)
    for plane, size in sizes.items():
        left = {3: size, 4: size, 5: head, 6: head}.get(plane, 0)
        assert trimmed[f"model-m{plane}.safetensors"]["Rss:"] == pytest.approx(left, abs=0.05 * size)
    assert same


def test_trim_leaves_copies_alone(nested_dir):
    model = otaro.load(nested_dir, "E5M8")
    for module in model.sefp.modules.values():
        for plane in range(4, 9):
            setattr(module.packed, f"plane{plane}", getattr(module.packed, f"plane{plane}").clone())
    expected = model.lm_head.weight.clone()
    otaro.set_precision(model, "E5M3")
    assert otaro.trim(model) == 0
    otaro.set_precision(model, "E5M8")
    assert expected.equal(model.lm_head.weight)


def test_trim_needs_a_nested_model():
    with pytest.raises(otaro.OtaroError, match="no precision to switch"):
        otaro.trim(object())
