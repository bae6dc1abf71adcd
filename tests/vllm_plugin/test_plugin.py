"""What vLLM asks of the plug-in. Needs vLLM, which lives in an environment of its own: `make vllm-test` runs
these."""

from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; `make vllm-test` makes an environment that has it"
)

from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader

import otaro.vllm
from otaro.errors import FormatError, OtaroError, PrecisionError, ShardMissingError, SlowWarning
from otaro.file.io import NestedDirectory
from otaro.sefp.precision import Precision
from otaro.vllm import loader, quantization, worker


@pytest.fixture(scope="module", autouse=True)
def _registered():
    (ours,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "sefp")
    assert ours.load() is otaro.vllm.register
    otaro.vllm.register()


@pytest.fixture
def nested(tiny):
    return NestedDirectory(tiny)


def config_of(directory="owner/name", **hf_config):
    config = get_quantization_config("sefp").from_config({})
    config.maybe_update_config(str(directory), hf_config=SimpleNamespace(**hf_config))
    return config


def linear(sizes=(128, 64, 64), rank=0, processes=1, inputs=128, each=None, prefix="layer"):
    """What `_take` and `create_weights` read of a layer of vLLM's that is merged of several."""
    mine = [size // processes for size in sizes]
    layer = SimpleNamespace(
        prefix=prefix, output_sizes=list(sizes), input_size=inputs, tp_rank=rank, tp_size=processes
    )
    quantization.SefpMethod().create_weights(layer, each or inputs, mine, inputs, sum(sizes), torch.float32)
    return layer


def loads(layer, nested, name, shard=None):
    loaded = quantization.stand_in(nested, f"model.layers.0.{name}.weight", torch.float32)
    layer.weight.weight_loader(layer.weight, loaded, shard)


def test_the_precision_comes_from_the_overrides_or_else_from_the_environment(monkeypatch):
    assert config_of().precision is None
    monkeypatch.setenv("OTARO_PRECISION", "e5m3")
    assert config_of().precision == Precision("E5M3")
    assert config_of(sefp={"precision": "E5M4"}).precision == Precision("E5M4")


def test_a_directory_is_opened_at_its_finest_and_what_it_lacks_is_refused_at_once(copy_of, tiny):
    some = copy_of(tiny, planes=(3, 4))
    assert config_of(some).precision == Precision("E5M4")
    with pytest.raises(ShardMissingError, match=r"E5M5 needs model-m5.safetensors"):
        config_of(some, sefp={"precision": "E5M5"})


def test_the_precision_is_part_of_what_vllm_tells_compiled_models_apart_by(tiny, monkeypatch):
    hf_config = SimpleNamespace()
    monkeypatch.setenv("OTARO_PRECISION", "E5M3")
    get_quantization_config("sefp").from_config({}).maybe_update_config(str(tiny), hf_config=hf_config)
    assert hf_config.sefp == {"precision": "E5M3"}


@pytest.mark.parametrize("wrong", [{"precison": "E5M4"}, "E5M4"])
def test_overrides_that_say_something_else_are_refused(wrong):
    with pytest.raises(OtaroError, match="must look like"):
        config_of(sefp=wrong)


def test_a_precision_that_does_not_exist_is_refused():
    with pytest.raises(PrecisionError, match="E5M9"):
        config_of(sefp={"precision": "E5M9"})


def test_models_that_are_not_nested_get_vllms_own_loader(monkeypatch):
    ours = get_model_loader(
        SimpleNamespace(load_format="auto", model_loader_extra_config={}, safetensors_load_strategy=None)
    )
    assert isinstance(ours, loader.SefpLoader)
    asked = []
    monkeypatch.setattr(
        loader.DefaultModelLoader, "load_weights", lambda self, model, config: asked.append(model)
    )
    ours.load_weights("a model", SimpleNamespace(quantization=None))
    assert asked == ["a model"]


def test_a_device_without_kernels_is_warned_of(monkeypatch):
    monkeypatch.delenv("OTARO_KERNELS", raising=False)
    monkeypatch.setattr(loader.ops, "backend", lambda device: ("reference", "nobody compiled them"))
    with pytest.warns(SlowWarning, match="nobody compiled them"):
        loader._warn_of_slowness(torch.device("cpu"))


def test_other_layers_keep_their_own_method():
    assert config_of().get_quant_method(torch.nn.Linear(2, 2), "attn") is None


def test_mixtures_of_experts_are_refused(monkeypatch):
    monkeypatch.setattr(quantization, "RoutedExperts", torch.nn.Identity)
    with pytest.raises(OtaroError, match=r"layers.0.experts: mixtures of experts"):
        config_of().get_quant_method(torch.nn.Identity(), "layers.0.experts")


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_layers_have_their_part_of_every_matrix(nested, rank):
    layer = linear(sizes=(384, 384), rank=rank, processes=2)
    loads(layer, nested, "mlp.up_proj", 1)
    loads(layer, nested, "mlp.gate_proj", 0)
    layer.sefp.attach(Precision("E5M8"), torch.device("cpu"))
    names = [matrix.name.split(".")[-2] for matrix in layer.sefp.matrices]
    assert names == ["gate_proj", "up_proj"]
    assert [matrix.part for matrix in layer.sefp.matrices] == [slice(192 * rank, 192 * rank + 192)] * 2
    assert quantization.SefpMethod().apply(layer, torch.randn(3, 128)).shape == (3, 384)


def test_matrices_that_are_fused_in_the_file_are_cut_as_the_layer_is(nested):
    layer = linear(sizes=(256, 128), rank=1, processes=2)  # a file that has both in one, of 384 rows
    loads(layer, nested, "mlp.up_proj")
    layer.sefp.attach(Precision("E5M3"), torch.device("cpu"))
    assert [matrix.part for matrix in layer.sefp.matrices] == [slice(128, 256), slice(256 + 64, 256 + 128)]


def test_a_tensor_of_another_shape_is_refused(nested):
    with pytest.raises(FormatError, match=r"q_proj.weight is \[128, 128\], but vLLM's layer has \[64, 128\]"):
        loads(linear(), nested, "self_attn.q_proj", 1)


def test_parts_that_are_not_single_matrices_are_refused(nested):
    with pytest.raises(FormatError, match=r"parts \(0, 1\)"):
        loads(linear(), nested, "self_attn.q_proj", (0, 1))


def test_a_tensor_that_is_not_packed_is_refused():
    layer = linear()
    with pytest.raises(FormatError, match="layer: its weight is not packed"):
        layer.weight.weight_loader(layer.weight, torch.zeros(128, 128), 0)


def test_a_packed_tensor_has_no_bytes_to_copy_by_mistake(nested):
    with pytest.raises(NotImplementedError):
        torch.empty(128, 128).copy_(
            quantization.stand_in(nested, "model.layers.0.self_attn.q_proj.weight", torch.float32)
        )


def vocabulary(start, stop, added=0):
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    layer.num_added_embeddings, layer.prefix, layer.tp_size = added, "embed_tokens", 4
    return layer


@pytest.mark.parametrize(
    ("layer", "words"), [(vocabulary(0, 8, 2), "added rows"), (vocabulary(8, 8), "fewer rows than 4")]
)
def test_vocabularies_that_cannot_be_dealt_out_are_refused(layer, words):
    with pytest.raises(OtaroError, match=words):
        quantization._rows(layer, 8, 8)


class Worker(SimpleNamespace):
    """As `collective_rpc` meets it."""

    def get_model(self):
        return self.model


def a_worker(nested, eager=True):
    layer = linear(sizes=(384, 384))
    loads(layer, nested, "mlp.gate_proj", 0)
    loads(layer, nested, "mlp.up_proj", 1)
    layer.sefp.attach(Precision("E5M3"), torch.device("cpu"))
    return Worker(model=torch.nn.Sequential(layer.sefp), model_config=SimpleNamespace(enforce_eager=eager))


def test_a_switch_is_answered_with_what_is_set(nested):
    one = a_worker(nested)
    assert worker.reach_precision(one, "E5M5") == "E5M5"
    assert one.model[0].bits == 3
    assert worker.set_precision(one, "e5m5") == "E5M5"
    assert one.model[0].bits == 5


def test_a_switch_that_cannot_be_is_answered_in_words_and_changes_nothing(nested, copy_of, tiny):
    without = a_worker(NestedDirectory(copy_of(tiny, planes=(3, 4))))
    assert "needs model-m5.safetensors" in worker.set_precision(without, "E5M5")
    assert without.model[0].bits == 3
    assert "unknown precision" in worker.set_precision(without, "E5M9")
    assert "--enforce-eager" in worker.set_precision(a_worker(nested, eager=False), "E5M5")
    plain = Worker(model=torch.nn.Linear(2, 2), model_config=SimpleNamespace(enforce_eager=True))
    assert "no precision to switch" in worker.set_precision(plain, "E5M5")


class Engine(SimpleNamespace):
    """A `vllm.LLM` of two workers that answers what it is told to."""

    busy, answers, reset = False, None, True

    @property
    def llm_engine(self):
        return SimpleNamespace(has_unfinished_requests=lambda: self.busy)

    def collective_rpc(self, method, args):
        self.asked.append((method, *args))
        return self.answers or [*args, *args]

    def reset_prefix_cache(self):
        self.asked.append("reset")
        return self.reset


def test_an_engine_has_all_planes_before_it_switches_and_forgets_prefixes_after_it():
    engine = Engine(asked=[])
    otaro.vllm.set_precision(engine, "e5m4")
    assert engine.asked == [("reach_precision", "E5M4"), ("set_precision", "E5M4"), "reset"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"busy": True}, "requests are under way"),
        ({"answers": ["E5M4", "E5M4 needs model-m4.safetensors"]}, "needs model-m4"),
        ({"reset": False}, "did not reset its prefix cache"),
    ],
)
def test_a_switch_that_fails_anywhere_is_refused(state, words):
    engine = Engine(asked=[], **state)
    with pytest.raises(OtaroError, match=words):
        otaro.vllm.set_precision(engine, "E5M4")
    assert "reset" not in state or engine.asked[-1] == "reset"
    assert "answers" not in state or engine.asked == [("reach_precision", "E5M4")]
