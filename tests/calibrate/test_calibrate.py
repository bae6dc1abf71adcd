"""Packing on a text: a matrix's codes, channel scales, layers from disk, the way from a stop to the end."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import otaro
from otaro.calibrate import codes, folds, run, text, work
from otaro.calibrate.layers import Skeleton
from otaro.errors import OtaroError, OtaroWarning, TargetError
from otaro.file.checkpoint import Checkpoint
from otaro.file.io import NestedDirectory
from otaro.file.planes import PLANES, unpack_codes
from otaro.sefp.codec import SefpTensor, encode
from tests.conftest import ALL

WINDOWS, LENGTH = 12, 32


class Letters:
    """A tokenizer: every character is a token."""

    bos_token_id = None

    def __call__(self, content, return_tensors=None, verbose=True, add_special_tokens=True):
        ids = [ord(letter) for letter in content]
        return {"input_ids": torch.tensor([ids])} if return_tensors else {"input_ids": ids}


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr(text, "load_tokenizer", lambda directory: Letters())
    monkeypatch.setattr(text, "LENGTH", LENGTH)


def content(vocabulary=64, seed=0, tokens=WINDOWS * LENGTH):
    drawn = torch.randint(1, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, drawn.tolist()))


def correlated(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4096, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    inputs += 0.3 * torch.randn(inputs.shape, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def error(weight, tensor, gram, bits):
    missed = weight - tensor.decode(f"E5M{bits}")
    return float(((missed @ gram) * missed).sum(dtype=torch.float64))


def codes_of(directory):
    nested = NestedDirectory(directory)
    found = {}
    for name, shape in nested.schema.packed.items():
        planes = [nested.plane(plane).tensor(name) for plane in PLANES]
        found[name] = unpack_codes(nested.base.tensor(name), planes, shape[-1])
    return found


def test_inputs_without_correlation_leave_nothing_to_compensate():
    # middles of cells
    weight = encode(torch.randn(40, 96, generator=torch.Generator().manual_seed(1))).decode("E5M8")
    plain = encode(weight)
    errors = codes.Errors(torch.diag(torch.rand(96) + 0.5))
    assert torch.equal(codes.compensated(weight, plain.scales, 64, errors), plain.finest_codes)


def test_the_code_chosen_is_the_best_of_all_prefixes():
    """No code beats it that is the nearest at some precision; none at all where the targets agree."""
    targets = 300 * torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    choice = codes._Choice(torch.device("cpu"))
    weights = torch.tensor(codes.LAMBDAS).view(-1, 1)
    every = torch.arange(-256.0, 256)
    values = torch.stack([choice.values(every[i : i + 1].expand(500)) for i in range(512)])
    cost = (weights * (values - targets).square()).sum(1)
    chosen = choice(targets)
    own = cost.gather(0, (chosen.long() + 256).unsqueeze(0))[0]
    for level, m in enumerate(codes.LEVELS):
        nearest = (values[:, level] - targets[level]).abs()
        tied = torch.where(nearest == nearest.amin(0), cost, torch.inf).amin(0)
        assert (own <= tied * 1.5).all(), m
    same = targets[:1].expand(6, -1)
    least = (weights * (values - same).square()).sum(1).amin(0)
    again = (weights * (choice.values(choice(same)) - same).square()).sum(0)
    assert torch.allclose(again, least, rtol=1e-5)


def test_errors_make_up_for_each_other_at_every_coarse_precision():
    weight, gram = correlated(64, 128)
    plain = encode(weight)
    chosen = codes.compensated(weight, plain.scales, 64, codes.Errors(gram))
    better = SefpTensor(plain.scale_bytes, plain.scale_exponent, chosen, 64, "midpoint")
    for bits in (3, 4, 5):
        assert error(weight, better, gram, bits) < 0.8 * error(weight, plain, gram, bits)


def test_rows_are_independent_of_how_they_are_cut(monkeypatch):
    weight, gram = correlated(200, 64)
    scales, errors = encode(weight).scales, codes.Errors(gram)
    whole = codes.compensated(weight, scales, 64, errors)
    monkeypatch.setattr(codes, "_BYTES_ON_CPU", 1)
    # products round by their shape
    assert (codes.compensated(weight, scales, 64, errors) != whole).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_scales_folded_into_a_norm_change_no_product(dtype, offset):
    weight, gram = correlated(48, 128)
    gram *= torch.logspace(-1, 1, 128).unsqueeze(1) * torch.logspace(-1, 1, 128)
    norm = (1 + 0.2 * torch.randn(128, generator=torch.Generator().manual_seed(3)) - offset).to(dtype)
    weights = {"w": weight.clone(), "norm": norm.float()}
    folds.apply(folds.Fold(("w",), "norm", offset), weights, gram, dtype, 64)
    assert torch.equal(weights["norm"].to(dtype).float(), weights["norm"])
    assert not torch.equal(weights["w"], weight)
    before, after = weight * (norm.float() + offset), weights["w"] * (weights["norm"] + offset)
    assert torch.allclose(before, after, rtol=1e-6)


def test_heads_that_share_a_value_share_its_scale():
    weight, gram = correlated(48, 4 * 16)
    gram *= torch.logspace(-1, 1, 64).unsqueeze(1) * torch.logspace(-1, 1, 64)
    weights = {"o": weight.clone(), "v": torch.ones(2 * 16, 10)}
    folds.apply(folds.Fold(("o",), rows_of="v", repeats=2, width=16), weights, gram, torch.float32, 64)
    # as each of the four heads reads it
    made = weights["v"][:, 0].view(2, 1, 16).expand(2, 2, 16).reshape(-1)
    assert not torch.equal(weights["o"], weight)
    assert torch.allclose(weights["o"] * made, weight, rtol=1e-6)


@pytest.mark.parametrize("architecture", ALL)
def test_layers_from_disk_are_the_model(architecture, make_checkpoint):
    checkpoint = make_checkpoint(architecture)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids = torch.randint(1, 64, (3, 24), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
        skeleton = Skeleton(Checkpoint(checkpoint), torch.device("cpu"))
        states = skeleton.start(ids, 2)
        for number in range(len(skeleton)):
            with skeleton.layer(number) as layer:
                states = torch.cat([skeleton.run(layer, number, some) for some in states.split(2)])
        found = torch.cat([skeleton.before_head(some) for some in states.split(2)])
    assert torch.allclose(found, seen[0], rtol=1e-3, atol=1e-4 * float(seen[0].abs().max()))


@pytest.mark.parametrize("architecture", ALL)
def test_every_architecture_is_packed_and_runs(architecture, make_checkpoint, tmp_path):
    checkpoint, out = make_checkpoint(architecture), tmp_path / "out"
    done = run.pack_calibrated(checkpoint, out, content(), samples=WINDOWS)
    plain = NestedDirectory(otaro.pack(checkpoint, tmp_path / "plain").path)
    assert done.nested.schema.packed == plain.schema.packed
    assert done.nested.schema.zeros == plain.schema.zeros
    done.nested.verify()
    changed = [
        name
        for name, found in codes_of(out).items()
        if not torch.equal(found, codes_of(tmp_path / "plain")[name])
    ]
    named = " ".join(done.plain)
    assert all(name in changed or name in named for name in done.nested.schema.packed)
    assert json.loads((out / "otaro.json").read_text())["calibrated"]["windows"] == [WINDOWS, LENGTH]
    assert list(tmp_path.glob(".out*")) == []
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = model(ids).logits
        calibrated = otaro.load(out, precision="E5M8")(ids).logits.float()
        coarse = otaro.load(tmp_path / "plain", precision="E5M3")(ids).logits.float()
    # a fold that were wrong would be far off
    assert (calibrated - expected).norm() < (coarse - expected).norm()


def test_an_expert_that_reads_too_few_tokens_is_packed_plainly_and_named(make_checkpoint, tmp_path):
    done = run.pack_calibrated(
        make_checkpoint("mixtral"), tmp_path / "out", content(tokens=4 * LENGTH), samples=4
    )
    assert any("experts" in name and "fewer tokens" in name for name in done.plain)


def stopped_at(name):
    def progress(what, done, total):
        if what == name:
            raise KeyboardInterrupt

    return progress


def test_a_stopped_run_goes_on_after_the_last_finished_layer(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint("llama")
    run.pack_calibrated(checkpoint, tmp_path / "whole", content(), samples=WINDOWS)
    with pytest.raises(KeyboardInterrupt):
        run.pack_calibrated(
            checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=stopped_at("layer 2 of 2")
        )
    assert not (tmp_path / "out").exists()
    seen = []
    run.pack_calibrated(
        checkpoint,
        tmp_path / "out",
        content(),
        samples=WINDOWS,
        progress=lambda what, done, total: seen.append(what),
    )
    assert "layer 1 of 2" not in seen
    assert "layer 2 of 2" in seen
    whole, resumed = codes_of(tmp_path / "whole"), codes_of(tmp_path / "out")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_another_text_begins_anew(make_checkpoint, tmp_path):
    checkpoint, seen = make_checkpoint("llama"), []
    with pytest.raises(KeyboardInterrupt):
        run.pack_calibrated(
            checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=stopped_at("layer 2 of 2")
        )
    run.pack_calibrated(
        checkpoint,
        tmp_path / "out",
        content(seed=1),
        samples=WINDOWS,
        progress=lambda what, done, total: seen.append(what),
    )
    assert "layer 1 of 2" in seen


def test_a_damaged_part_is_refused(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint("llama")
    with pytest.raises(KeyboardInterrupt):
        run.pack_calibrated(
            checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=stopped_at("layer 2 of 2")
        )
    (tmp_path / ".out.calibrating" / "part-00000").write_bytes(b"no part")
    with pytest.raises(OtaroError, match=r"is damaged.*remove"):
        run.pack_calibrated(checkpoint, tmp_path / "out", content(), samples=WINDOWS)
    assert not (tmp_path / "out").exists()


def damaged(folder, how):
    states = folder / "states-1"  # after the first layer
    if how == "missing":
        states.unlink()
    elif how == "truncated":
        os.truncate(states, states.stat().st_size // 2)
    else:
        states.write_bytes(bytes(states.stat().st_size))


@pytest.mark.parametrize("how", ["missing", "truncated", "zeros"])
def test_states_that_are_not_the_last_layers_begin_anew(how, make_checkpoint, tmp_path):
    checkpoint, seen = make_checkpoint("llama"), []
    run.pack_calibrated(checkpoint, tmp_path / "whole", content(), samples=WINDOWS)
    with pytest.raises(KeyboardInterrupt):
        run.pack_calibrated(
            checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=stopped_at("layer 2 of 2")
        )
    damaged(tmp_path / ".out.calibrating", how)
    with pytest.warns(OtaroWarning, match="begun anew"):
        run.pack_calibrated(
            checkpoint,
            tmp_path / "out",
            content(),
            samples=WINDOWS,
            progress=lambda what, done, total: seen.append(what),
        )
    assert "layer 1 of 2" in seen
    whole, resumed = codes_of(tmp_path / "whole"), codes_of(tmp_path / "out")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_after_the_head_no_states_are_needed(make_checkpoint, tmp_path):
    checkpoint, seen = make_checkpoint("llama"), []
    with pytest.raises(KeyboardInterrupt):
        run.pack_calibrated(
            checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=stopped_at("packing")
        )
    for states in (tmp_path / ".out.calibrating").glob("states-*"):
        states.unlink()
    run.pack_calibrated(
        checkpoint,
        tmp_path / "out",
        content(),
        samples=WINDOWS,
        progress=lambda what, done, total: seen.append(what),
    )
    assert seen == ["packing"]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


sets_room_aside = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="this system sets no room aside"
)


@sets_room_aside
def test_a_disk_without_room_for_the_states_is_refused_with_the_bytes(make_checkpoint, tmp_path, monkeypatch):
    checkpoint = make_checkpoint("llama")
    monkeypatch.setattr(os, "posix_fallocate", full)
    needed = 2 * WINDOWS * LENGTH * Checkpoint(checkpoint).config.hidden_size * 4
    with pytest.raises(TargetError, match=rf"{needed:,} bytes in .*\.out\.calibrating"):
        run.pack_calibrated(checkpoint, tmp_path / "out", content(), samples=WINDOWS)
    assert list(tmp_path.iterdir()) == []


@sets_room_aside
def test_the_room_for_the_states_is_set_aside_at_once(make_checkpoint, tmp_path):
    taken = []

    def progress(what, done, total):
        if what == "layer 1 of 2":
            taken.extend(path.stat() for path in (tmp_path / ".out.calibrating").glob("states-*"))

    checkpoint = make_checkpoint("llama")
    run.pack_calibrated(checkpoint, tmp_path / "out", content(), samples=WINDOWS, progress=progress)
    size = WINDOWS * LENGTH * Checkpoint(checkpoint).config.hidden_size * 4
    assert [one.st_size for one in taken] == [size, size]


def test_a_disk_that_is_full_later_is_said_and_finished_layers_stay(make_checkpoint, tmp_path, monkeypatch):
    checkpoint, save = make_checkpoint("llama"), work.save_file

    def second_fails(data, path, metadata):
        if (tmp_path / ".out.calibrating" / "part-00000").exists():
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(data, path, metadata)

    monkeypatch.setattr(work, "save_file", second_fails)
    with pytest.raises(TargetError, match=r"\.out\.calibrating: the disk is full"):
        run.pack_calibrated(checkpoint, tmp_path / "out", content(), samples=WINDOWS)
    assert [path.name for path in (tmp_path / ".out.calibrating").glob("part*")] == ["part-00000"]


def test_a_refused_architecture_leaves_nothing(make_checkpoint, tmp_path, monkeypatch):
    def refused(*_):
        raise OtaroError("no list of layers")

    monkeypatch.setattr(Skeleton, "_find_layers", refused)
    with pytest.raises(OtaroError, match="no list of layers"):
        run.pack_calibrated(make_checkpoint("llama"), tmp_path / "out", content(), samples=WINDOWS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"content": "ab"}, "less than one window"),
        ({"content": "ab" * 16}, "too few to calibrate on"),
        ({"content": "\u4e2d" * 400}, "belongs to another model"),
        ({"reconstruction": "truncate"}, "midpoints"),
        ({"samples": 0}, "at least one window"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(options, words, make_checkpoint, tmp_path):
    options = {"content": content(), **options}
    with pytest.raises(OtaroError, match=words):
        run.pack_calibrated(make_checkpoint("llama"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "words"), [("file", "is not a directory"), ("folder", "is not empty")])
def test_a_place_that_is_taken_is_refused_before_anything_is_computed(kind, words, make_checkpoint, tmp_path):
    out, seen = tmp_path / "out", []
    mine = out if kind == "file" else out / "letter.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(TargetError, match=words):
        run.pack_calibrated(
            make_checkpoint("llama"), out, content(), progress=lambda what, done, total: seen.append(what)
        )
    assert seen == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("architecture", "words"), [("llama", "no tokenizer that opens"), ("gpt2", "has no tokenizer, and")]
)
def test_a_missing_tokenizer_is_refused(architecture, words, make_checkpoint, tmp_path, monkeypatch):
    """Without files, transformers refuses some models, and makes up a tokenizer without words for others."""
    monkeypatch.undo()
    with pytest.raises(OtaroError, match=words):
        run.pack_calibrated(make_checkpoint(architecture), tmp_path / "out", content())
    assert list(tmp_path.iterdir()) == []


def test_windows_of_examples_begin_with_one_and_go_on_with_the_next():
    # 20 tokens
    examples = [list(range(10 * number, 10 * number + size)) for number, size in enumerate((4, 3, 5, 2, 6))]
    flat = [token for example in examples for token in example]
    found = text.windows_of_examples(examples, samples=9, length=8)
    assert found.shape == (2, 8)  # as many as lie side by side
    # the first example, and the last that has eight tokens from it on
    assert found.tolist() == [flat[:8], flat[12:]]
    with pytest.raises(OtaroError, match="20 tokens, less than one window of 21"):
        text.windows_of_examples(examples, samples=9, length=21)


def test_windows_serve_in_place_of_a_text(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint("llama")
    run.pack_calibrated(checkpoint, tmp_path / "text", content(), samples=WINDOWS)
    windows = text.windows(content(), Letters(), WINDOWS, LENGTH)
    done = run.pack_calibrated(checkpoint, tmp_path / "windows", windows)
    assert done.tokens == windows.numel()
    of_windows, of_text = codes_of(tmp_path / "windows"), codes_of(tmp_path / "text")
    assert all(torch.equal(of_windows[name], of_text[name]) for name in of_text)
    with pytest.raises(OtaroError, match="too few to calibrate on"):
        run.pack_calibrated(checkpoint, tmp_path / "few", windows[:1, :8])
    assert not (tmp_path / "few").exists()
