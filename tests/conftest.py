"""What tests share: tiny checkpoints made on the fly, nested directories packed from them, and cheap child
processes.

The checkpoints have random weights and awkward sizes: no width is a multiple of 64, so rows end in short
groups, and 80 and 112 are no multiples of 32 either, so blocks are padded. Norms and biases are random too,
or nobody would miss them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

# Both before torch and transformers are imported. No test may reach for the network, and threads that wait
# for each other's tiny share of a tiny tensor must not keep the few cores busy.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # pytest's workers are given a width, which is not that of a pipe

# `make sanitize` names another build of the extension. It takes the place of the installed one, before that
# is imported.
if _other_build := os.environ.get("OTARO_CPU_MODULE"):
    _spec = importlib.util.spec_from_file_location("otaro.kernels._cpu", _other_build)
    sys.modules["otaro.kernels._cpu"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["otaro.kernels._cpu"])

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import otaro
from otaro.kernels import cpu, reference
from otaro.kernels.ops import FEW_TOKENS
from otaro.kernels.packed import Packed

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A file goes to one process, and these take the longest: what starts last must be short.
    long = ["test_study.py", "test_proof.py", "test_demo.py", "test_tune_processes.py"]
    long += [
        "test_trainer.py",
        "test_tune.py",
        "test_hub.py",
        "test_distributed.py",
        "test_resume.py",
        "test_threads.py",
    ]
    items.sort(key=lambda item: long.index(item.path.name) if item.path.name in long else len(long))


SIZES = {
    "vocab_size": 120,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": {"model_type": "llama", "dtype": "float16"},
    "llama_tied": {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "dtype": "bfloat16", "hidden_size": 80, "head_dim": 20},
    "qwen2": {"model_type": "qwen2", "dtype": "float16"},
    "qwen3": {"model_type": "qwen3", "dtype": "float32"},
    "mixtral": {"model_type": "mixtral", "dtype": "bfloat16", **EXPERTS},
    "qwen3_moe": {"model_type": "qwen3_moe", "dtype": "float16", "moe_intermediate_size": 80, **EXPERTS},
}
# Their embedding scales its rows.
GEMMAS = {
    "gemma": {"model_type": "gemma", "dtype": "bfloat16"},
    "gemma2": {
        "model_type": "gemma2", "dtype": "float16", "head_dim": 28, "query_pre_attn_scalar": 20,
        "sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "dtype": "float32", "head_dim": 20, "query_pre_attn_scalar": 28,
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
}  # fmt: skip
# What decoders serve besides, each with what sets it apart.
MORE = {
    "phi3": {
        "model_type": "phi3", "dtype": "bfloat16", "sliding_window": 11, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "olmo2": {
        "model_type": "olmo2", "dtype": "float32", "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "smollm3": {
        "model_type": "smollm3", "dtype": "bfloat16", "no_rope_layers": [1, 0], "use_sliding_window": True,
        "sliding_window": 9, "pad_token_id": 0, "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite", "dtype": "float16", "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "attention_multiplier": 0.11, "logits_scaling": 2.5,
    },
    "qwen3_moe_mixed": {  # a layer without experts; scores as they are
        "model_type": "qwen3_moe", "dtype": "float32", "head_dim": 20, "moe_intermediate_size": 80,
        "mlp_only_layers": [0], "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
}  # fmt: skip


# Run by transformers; its projections are [in, out].
GPT2 = {"gpt2": {"model_type": "gpt2", "dtype": "float32"}}
ALL = {**ARCHITECTURES, **GEMMAS, **MORE, **GPT2}


def make_model(architecture: str, **changes: object) -> transformers.PreTrainedModel:
    """A random model of one of ALL, the same one every time."""
    settings = {**SIZES, **ALL[architecture], **changes}
    dtype = getattr(torch, str(settings.pop("dtype")))
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        # Rows of different sizes, so that scales differ; norms lie around one.
        scales = 0.2 * 2.0 ** torch.randint(-3, 2, (*parameter.shape[:-1], 1), generator=generator)
        parameter.data = (1 + 0.2 * values if "norm" in name else values * scales).to(dtype)
    return model


@pytest.fixture(scope="session")
def random_model() -> Callable[..., transformers.PreTrainedModel]:
    """random_model("qwen2", sliding_window=8) is a model of its own; see `make_model`."""
    return make_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here: on a busy machine a second thread costs far more in waiting than it saves.

    `make portability` asks for two all the same: a library's product has other bits then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OTARO_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint("qwen2") is an ordinary checkpoint, shared by all tests: read only."""

    @cache
    def make(architecture: str) -> Path:
        directory = tmp_path_factory.mktemp(architecture) / "checkpoint"
        make_model(architecture).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def make_nested(make_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_nested("qwen2", "truncate") is that checkpoint packed, shared by all tests: do not write there."""

    @cache
    def make(architecture: str, reconstruction: str = "midpoint") -> Path:
        directory = tmp_path_factory.mktemp(architecture) / reconstruction
        otaro.pack(make_checkpoint(architecture), directory, reconstruction=reconstruction)
        return directory

    return make


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[*GEMMAS, "phi3", *GPT2])
def other_architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def as_packed() -> Callable[[str, torch.Tensor], torch.Tensor]:
    """as_packed(name, weight): the layout that is packed, transposed for GPT-2's convolutions; and back."""
    return lambda name, weight: weight.T.contiguous() if ".c_" in name else weight


@pytest.fixture(params=["midpoint", "truncate"])
def reconstruction(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def checkpoint_dir(make_checkpoint) -> Path:
    """An ordinary LLaMA checkpoint; do not write into it."""
    return make_checkpoint("llama")


@pytest.fixture(scope="session")
def nested_dir(make_nested) -> Path:
    """The LLaMA checkpoint packed; do not write into it."""
    return make_nested("llama")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """copy_of(directory) is a copy to damage, or some shards: copy_of(directory, planes=(3, 4))."""

    def copy(directory: Path, planes: tuple[int, ...] = tuple(range(3, 9))) -> Path:
        target = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        left_out = {f"model-m{plane}.safetensors" for plane in range(3, 9) if plane not in planes}
        return Path(shutil.copytree(directory, target, ignore=lambda _, names: left_out & set(names)))

    return copy


@pytest.fixture
def swift_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference multiplies by the extension: with the same bits, in a tenth of its time."""
    if cpu.MISSING:
        return
    slow = reference.linear

    def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
        if x.device.type != "cpu":
            return slow(x, packed)
        return torch.cat([cpu.linear(few.contiguous(), packed) for few in x.split(FEW_TOKENS)])

    monkeypatch.setattr(reference, "linear", linear)


# Importing torch and transformers takes seconds, a fork of a process that has done so milliseconds.
_FORK_SERVER = """
import json, os, sys
import torch, transformers.trainer, transformers.models.llama.modeling_llama
torch.set_num_threads(1)  # threads do not survive a fork
print("ready", flush=True)
for line in sys.stdin:
    code, out, err = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for name, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
        status = 1
        try:
            exec(compile(code, "<child>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[Callable[..., subprocess.Popen]]:
    with ExitStack() as stack:

        @cache
        def start(**environment: str) -> subprocess.Popen:
            command, env = [sys.executable, "-c", _FORK_SERVER], {**os.environ, **environment}
            server = stack.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env))
            stack.callback(server.stdin.close)
            assert server.stdout.readline() == "ready\n"
            return server

        yield start


@pytest.fixture
def in_child(
    _fork_server: Callable[..., subprocess.Popen], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess]:
    """in_child(code) runs Python code in a process of its own that has imported torch and transformers, but
    not otaro.

    Returns exit status (negative for a signal), stdout and stderr. in_child(code, HF_HOME="...") has that
    environment too.
    """

    def run(code: str, **environment: str) -> subprocess.CompletedProcess:
        server, out, err = _fork_server(**environment), tmp_path / "child.out", tmp_path / "child.err"
        out.unlink(missing_ok=True)
        err.unlink(missing_ok=True)
        server.stdin.write(json.dumps([textwrap.dedent(code), str(out), str(err)]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The built-in model, packed; do not write into it."""
    directory = tmp_path_factory.mktemp("evaluate") / "tiny"
    otaro.pack("builtin", directory)
    return directory


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """A folder with arc_easy.jsonl.gz and boolq.jsonl: six questions each, with their data sets' fields."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["list", "string", "function", "module"]
    arc = [
        {
            "id": str(number),
            "question": f"What does call number {number} return?",
            "choices": {"text": [f"a {word} of {number}" for word in words], "label": list("ABCD")},
            "answerKey": "ABCD"[number % 4],
        }
        for number in range(6)
    ]
    boolq = [
        {
            "question": f"is number {number} even",
            "passage": f"The number is {number}.",
            "idx": number,
            "label": number % 2,
        }
        for number in range(6)
    ]
    with gzip.open(folder / "arc_easy.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in arc)
    (folder / "boolq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in boolq))
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Text and tasks that lie beside the repository."""
    directory = ROOT.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"the evaluation data is not on this machine (no {directory})")
    return directory


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M as an ordinary checkpoint."""
    directory = ROOT / "models" / "SmolLM2-135M"
    if not (directory / "model.safetensors").is_file():
        pytest.skip("SmolLM2-135M is not on this machine; fetch it with runs/get_smollm2.sh")
    return directory
