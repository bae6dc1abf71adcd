"""Models by Hub id: what is fetched, from where and with which token, and at which precision they then run.

The client is the real one, in a child process; it asks a Hub on this machine.
"""

import itertools
import json
from types import SimpleNamespace

import pytest
from huggingface_hub import errors
from typer.testing import CliRunner

import otaro
from otaro.cli.main import app
from otaro.errors import CheckpointError
from otaro.file.checkpoint import resolve_model
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory

from .local_hub import Repository, local_hub

TOKEN = "hf_no_secret"
NUMBERS = itertools.count()
PLANES = [f"model-m{plane}.safetensors" for plane in range(4, 9)]

COMMANDS = ["pack", "inspect", "verify", "generate", "chat", "bench", "tune", "eval", "demo"]
COMMANDS += ["analyze gradients", "analyze weights"]


@pytest.fixture(scope="module")
def hub():
    with local_hub() as hub:
        yield hub


@pytest.fixture
def repository(hub):
    """A repository of this test's own; what other tests asked the Hub for is forgotten."""
    repository = Repository(name=f"someone/model-{next(NUMBERS)}")
    hub.repositories[repository.name] = repository
    hub.requests.clear()
    hub.sent.clear()
    return repository


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """The default cache, of all tests here."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def online(in_child, hub, home):
    """online(code) runs code whose Hub is the local one, with a function `show(model)`; its last line of
    output as JSON.
    """
    preamble = """
import json, warnings, otaro
from transformers import AutoModelForCausalLM, pipeline
from transformers.utils import logging
logging.disable_progress_bar()
def show(model):
    nested = model.sefp.nested
    nested.verify()
    print(json.dumps([str(nested.path), sorted(set(map(str, otaro.precisions_of(model).values())))]))
def refusal(act):
    try:
        act()
    except otaro.OtaroError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""

    def run(code):
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        child = in_child(preamble + code, **settings)
        assert child.returncode == 0, child.stderr
        assert TOKEN not in child.stdout + child.stderr
        return [json.loads(line) for line in child.stdout.splitlines()]

    return run


def opened_by(how, name, arguments):
    opening = {
        "from_pretrained": f"AutoModelForCausalLM.from_pretrained({name!r}, {arguments})",
        "pipeline": f"pipeline('text-generation', model={name!r}, {arguments}).model",
        "otaro.load": f"otaro.load({name!r}, {arguments})",
    }
    return f"show({opening[how]})"


@pytest.mark.parametrize("how", ["from_pretrained", "otaro.load"])
def test_planes_come_as_the_base_shard_does(how, hub, repository, online, make_nested, tmp_path, home):
    """By revision, with the token, into the cache that was named; another model is on `main`."""
    repository.token = TOKEN
    wanted = repository.commit("old", make_nested("llama", "truncate"))
    other = repository.commit("main", make_nested("llama"))
    arguments = f"revision='old', token={TOKEN!r}, cache_dir={str(tmp_path / 'mine')!r}"
    [[path, precisions]] = online(opened_by(how, repository.name, arguments))
    folder = "models--" + repository.name.replace("/", "--")
    assert path == str(tmp_path / "mine" / folder / "snapshots" / wanted)
    assert precisions == ["E5M8"]
    assert not list((home / "hub" / folder).glob("snapshots/*/*"))
    asked = [(path, token) for _, path, token in hub.requests if repository.name in path]
    assert {token for _, token in asked} == {TOKEN}
    assert not any(other in path for path, _ in asked)
    assert set(PLANES) <= set(hub.fetched())


def test_a_pipeline_fetches_planes_too(hub, repository, online, tiny):
    repository.commit("main", tiny)
    assert online(opened_by("pipeline", repository.name, ""))[0][1] == ["E5M8"]


def test_a_subfolder_holds_all_of_its_model(hub, repository, online, make_nested):
    repository.commit("main", make_nested("llama", "truncate"))
    commit = repository.commit("main", make_nested("llama"), subfolder="nested/")
    [[path, precisions]] = online(opened_by("from_pretrained", repository.name, "subfolder='nested'"))
    assert path.endswith(f"/snapshots/{commit}/nested")
    assert precisions == ["E5M8"]


@pytest.mark.parametrize(
    ("how", "precision", "expected"),
    [
        ("from_pretrained", "quantization_config=otaro.SefpConfig(precision='E5M5')", ["E5M5"]),
        ("otaro.load", "'E5M5'", ["E5M5"]),
        ("otaro.load", "{'*': 'E5M3', 'lm_head': 'E5M5'}", ["E5M3", "E5M5"]),
    ],
)
def test_only_the_shards_of_the_precision_are_fetched(
    how, precision, expected, hub, repository, online, nested_dir
):
    repository.commit("main", nested_dir)
    assert online(opened_by(how, repository.name, precision))[0][1] == expected
    assert [name for name in hub.fetched() if name in PLANES] == PLANES[:2]


@pytest.mark.parametrize("how", ["from_pretrained", "otaro.load"])
def test_a_repository_that_stops_early_is_known_to(how, hub, repository, online, nested_dir, copy_of):
    """Its finest precision is the default, offline as well; a finer one is refused."""
    repository.commit("main", copy_of(nested_dir, planes=(3, 4, 5)))
    assert online(opened_by(how, repository.name, ""))[0][1] == ["E5M5"]
    offline = opened_by("from_pretrained", repository.name, "local_files_only=True")
    assert online(offline)[0][1] == ["E5M5"]
    finer = "quantization_config=otaro.SefpConfig(precision='E5M6')" if how == "from_pretrained" else "'E5M6'"
    [message] = online(f"refusal(lambda: {opened_by(how, repository.name, finer)})")
    needs = f"ShardMissingError: E5M6 needs model-m6.safetensors, which {repository.name} at "
    assert message.startswith(needs)
    assert message.endswith("lacks; ask for E5M5 or a lower one")


def test_what_could_not_be_fetched_is_not_taken_for_what_is_not_there(hub, repository, online, nested_dir):
    """Offline with planes 4 and 5 in the cache: nobody knows of finer ones, so only E5M5 by name will do."""
    repository.commit("main", nested_dir)
    name = repository.name
    online(opened_by("otaro.load", name, "'E5M5'"))

    def ask(arguments):
        opening = f"AutoModelForCausalLM.from_pretrained({name!r}, local_files_only=True, {arguments})"
        return online(f"refusal(lambda: show({opening}))")[0]

    for arguments in ("", "quantization_config=otaro.SefpConfig(precision='E5M8')"):
        refused = ask(arguments)
        assert refused.startswith(f"CheckpointError: model-m6.safetensors of {name} could not be fetched: ")
        assert refused.endswith("What is there is complete up to E5M5; to run that, ask for it by name")
    assert ask("quantization_config=otaro.SefpConfig(precision='E5M5')")[1] == ["E5M5"]


@pytest.mark.parametrize("how", ["from_pretrained", "otaro.load"])
def test_a_hub_that_fails_to_deliver_a_plane_lowers_no_precision(how, hub, repository, online, nested_dir):
    repository.commit("main", nested_dir)
    repository.withheld = PLANES[1]
    [message] = online(f"refusal(lambda: {opened_by(how, repository.name, '')})")
    assert message.startswith(f"CheckpointError: {PLANES[1]} of {repository.name} could not be fetched: ")


def test_commands_reach_the_hub_as_told(hub, repository, online, make_checkpoint, make_nested, tmp_path):
    """What they write down has the revision, never the token."""
    repository.token = TOKEN
    repository.commit("v1", make_nested("llama"))
    plain = hub.repositories[f"{repository.name}-plain"] = Repository(token=TOKEN)
    plain.commit("v1", make_checkpoint("llama"))
    options = f"--revision v1 --token {TOKEN} --cache-dir {tmp_path / 'cache'}"
    commands = [
        f"verify {repository.name} {options} --json",
        f"inspect {repository.name} {options} --json",
        f"pack {repository.name}-plain {tmp_path / 'packed'} {options} --json",
        f"analyze weights {repository.name}-plain --out {tmp_path / 'analysis'} {options} --json",
    ]
    verified, *_ = online(f"""
from otaro.cli.main import app
for command in {commands!r}:
    app(command.split(), standalone_mode=False)
""")
    assert verified["finest"] == "E5M8"
    kept = json.loads((tmp_path / "analysis" / "weights.json").read_text())
    assert f"--revision v1 --cache-dir {tmp_path / 'cache'}" in kept["command"]
    assert TOKEN not in json.dumps(kept)
    same = NestedDirectory(tmp_path / "packed").base.header.model
    assert same == NestedDirectory(make_nested("llama")).base.header.model


def test_fetch_brings_one_commit_and_inspect_its_headers_alone(
    hub, repository, online, make_nested, tmp_path, home
):
    """By revision and with the token, past the cache; a model that `main` points to later is not mixed in."""
    repository.token = TOKEN
    wanted, out = make_nested("llama"), tmp_path / "out"
    repository.commit("v1", wanted)
    other = repository.commit("main", make_nested("llama", "truncate"))
    run = """
from otaro.cli.main import app
for command in {}:
    app(command.split(), standalone_mode=False)
"""
    options = f"--revision v1 --token {TOKEN} --json"
    [shown] = online(run.format([f"inspect {repository.name} {options}"]))
    sizes = {path.name: path.stat().st_size for path in wanted.glob("*.safetensors")}
    assert [row["bytes"] for row in shown["precisions"]][::5] == [
        sum(sizes.values()),
        sizes["model-m3.safetensors"],
    ]
    assert shown["modules"] == []
    headers = sum(NestedDirectory(wanted).plane(plane).header.data_start for plane in range(3, 9))
    assert sum(hub.sent_of(name) for name in sizes) == headers
    commands = [f"fetch {repository.name} {out} -p {precision} {options}" for precision in ("E5M4", "E5M8")]
    first, second = online(run.format(commands))
    assert (first["finest"], second["fetched"]) == ("E5M4", PLANES[1:])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        p.name: p.read_bytes() for p in wanted.iterdir()
    }
    assert not any(other in path for _, path, _ in hub.requests)
    assert not list((home / "hub").glob(f"*{repository.name.rpartition('/')[2]}/snapshots/*/*"))
    (out / PLANES[4]).unlink()
    [message] = online("from otaro.file.fetch import fetch, Hub\nrefusal(lambda: "
                       f"fetch({repository.name!r}, {str(out)!r}, "
                       f"hub=Hub(token={TOKEN!r})))")  # fmt: skip
    assert "belongs to another model" in message


def test_a_wrong_token_is_a_refusal_in_one_line(repository, online, nested_dir, tmp_path):
    repository.token = TOKEN
    repository.commit("main", nested_dir)
    [message] = online(f"""
from otaro.cli.main import app
refusal(lambda: app(["verify", {repository.name!r}, "--token", "hf_wrong"], standalone_mode=False))
""")
    name = repository.name
    failed = (
        f"there is no directory {name} here, and the Hub has no {name} for you: check the name; a private"
    )
    assert message.startswith(f"CheckpointError: {failed} model needs a token (401 ")
    assert "hf_wrong" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_takes_a_model_takes_the_options_of_the_hub(command):
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    for option in ("--revision", "--token", "--cache-dir"):
        assert option in shown


def test_a_revision_of_what_is_on_this_machine_is_refused(nested_dir):
    for model in (nested_dir, "builtin"):
        with pytest.raises(
            CheckpointError, match="is on this machine and has no revision 'v1'; leave the revision out"
        ):
            resolve_model(model, hub=Hub(revision="v1"))
    with pytest.raises(CheckpointError, match="has no revision"):
        otaro.load(nested_dir, revision="v1")


def test_a_token_is_not_shown():
    assert TOKEN not in repr(Hub(token=TOKEN))


def answered(kind, status):
    """An error of the Hub's client."""
    return kind(
        f"{status} Client Error", response=SimpleNamespace(status_code=status, headers={}, request=None)
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError("no route to host\nand much more"),
            r"could not be reached .* HF_ENDPOINT .* \(no route to host\)$",
        ),
        (
            answered(errors.RepositoryNotFoundError, 404),
            r"the Hub has no \S+ for you: check the name.* \(404 ",
        ),
        (answered(errors.GatedRepoError, 403), r"accepted its terms; do so .* give a token \(403 "),
        (answered(errors.RevisionNotFoundError, 404), r" on the Hub has no revision v9; name a branch"),
        (answered(errors.HfHubHTTPError, 503), r"the Hub answered with an error; try again later.* \(503 "),
        (errors.LocalEntryNotFoundError("not cached"), "cache has not all of it, .*; give a directory$"),
    ],
)
def test_a_model_that_is_not_to_be_had_is_refused_with_why_and_what_to_do(monkeypatch, error, words):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"^there is no directory someone/model here, and .*{words}"):
        resolve_model("someone/model", hub=Hub(revision="v9"))
    with pytest.raises(CheckpointError, match=f"^there is no directory modle here. If a model .*{words}"):
        resolve_model("modle", hub=Hub(revision="v9"))
