"""Models by Hub id: what is fetched, and at which precision they then run. The Hub itself is played by a local directory."""

import shutil

import pytest

import otaro
from otaro.errors import CheckpointError
from otaro.file.checkpoint import resolve_model


@pytest.fixture
def hub(monkeypatch, tmp_path, nested_dir):
    """A Hub with one model; fetching copies the files that match the patterns into a cache and notes them."""
    import huggingface_hub

    cache, fetched = tmp_path / "cache", []
    cache.mkdir()

    def snapshot_download(repo, allow_patterns, revision=None):
        assert repo == "someone/model"
        for pattern in allow_patterns:
            for path in nested_dir.glob(pattern):
                if not (cache / path.name).exists():
                    shutil.copy(path, cache)
                    fetched.append(path.name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return fetched


def shards(names):
    return sorted(name for name in names if name.endswith(".safetensors"))


def test_only_the_shards_of_the_precision_are_fetched(hub):
    model = otaro.load("someone/model", "E5M5")
    assert shards(hub) == ["model-m3.safetensors", "model-m4.safetensors", "model-m5.safetensors"]
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M5"}


def test_without_a_precision_all_shards_are_fetched(hub):
    model = otaro.load("someone/model")
    assert len(shards(hub)) == 6
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M8"}


def test_a_map_fetches_what_its_finest_entry_needs(hub):
    model = otaro.load("someone/model", {"*": "E5M3", "lm_head": "E5M4"})
    assert shards(hub) == ["model-m3.safetensors", "model-m4.safetensors"]
    assert str(otaro.precisions_of(model)["lm_head"]) == "E5M4"


def test_from_pretrained_fetches_the_planes_that_transformers_does_not_know_of(hub, nested_dir, monkeypatch, tmp_path):
    """transformers fetches what config.json names, the base shard, and would run at E5M3 without a word."""
    from transformers import AutoConfig

    from otaro.runtime.hf import SefpConfig, SefpQuantizer

    config = AutoConfig.from_pretrained(nested_dir)
    config.name_or_path = "someone/model"
    SefpQuantizer(SefpConfig(precision="E5M4"))._fetch_planes(config)
    assert shards(hub) == ["model-m3.safetensors", "model-m4.safetensors"]
    SefpQuantizer(SefpConfig())._fetch_planes(config)
    assert len(shards(hub)) == 6


def test_an_unreachable_hub_is_a_refusal(monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"someone/model is not a directory, and fetching it .* no route to host$"):
        resolve_model("someone/model")
