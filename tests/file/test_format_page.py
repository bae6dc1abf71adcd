"""FORMAT.md is run: its reader against the package, its bytes against the packer, its example file too."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

import otaro
from otaro.errors import FormatError
from otaro.file.header import BASE, Schema
from otaro.file.io import NestedDirectory, NestedWriter, PackedRows
from otaro.file.planes import PLANES, pack_codes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "FORMAT.md").read_text()
GOLDEN = ROOT / "tests" / "golden"


def write_example(target: Path, reconstruction: str) -> dict[str, torch.Tensor]:
    """A model of two packed tensors, one of them three-dimensional with padded rows, and a norm; every byte
    is determined.
    """
    numbers = torch.arange(2 * 3 * 70, dtype=torch.float32)
    weights = {
        "a.weight": ((numbers * 37 % 101 - 50) / 64).reshape(6, 70),
        "b.experts": ((numbers * 53 % 97 - 48) / 4096).reshape(2, 3, 70)[..., :33].contiguous(),
    }
    weights["a.weight"][0, 3] = 30000.0
    schema = Schema(64, reconstruction, {name: tuple(weight.shape) for name, weight in weights.items()})
    with NestedWriter.create(target, schema, {"norm.weight": (torch.bfloat16, (4,))}) as writer:
        for name, weight in weights.items():
            rows = weight.reshape(-1, weight.shape[-1])
            writer.append_rows(
                name,
                PackedRows.of(
                    otaro.encode(rows, reconstruction=reconstruction), zeros=int((rows == 0).sum())
                ),
            )
        writer.append_stored(BASE, "norm.weight", torch.tensor([1.0, 0.5, -2.0, 3.0], dtype=torch.bfloat16))
    return weights


@pytest.fixture(params=["midpoint", "truncate"])
def example(request, tmp_path):
    return tmp_path / "example", write_example(tmp_path / "example", request.param), request.param


@pytest.mark.parametrize("precision", otaro.PRECISIONS, ids=str)
def test_the_reader_of_the_page_reads_what_the_package_writes(example, precision):
    directory, weights, reconstruction = example
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    namespace = {}
    exec(code, namespace)
    for name, weight in weights.items():
        values = namespace["read_tensor"](directory, name, precision.mantissa_bits)
        assert (
            values == otaro.encode(weight, reconstruction=reconstruction).decode(precision).flatten().tolist()
        )


def test_the_worked_bytes_of_the_page_are_what_the_packer_makes():
    block = PAGE.split("Worked bytes.")[1].split("## Shards")[0]
    stated = {
        name.strip(): value.split("(")[0].split()
        for name, value in re.findall(
            r"(scales|base |plane "
            r"\d) +(.*)",
            block,
        )
    }
    t = otaro.encode(torch.tensor([[0.8, -0.3, 0.02]]))
    base, planes = pack_codes(t.finest_codes)
    made = {"scales": t.scale_bytes[0], "base": base[0]}
    made |= {f"plane {number}": plane[0] for number, plane in zip(PLANES, planes, strict=True)}
    assert stated.keys() == made.keys()
    for name, values in stated.items():
        digits = [f"{byte:02x}" for byte in made[name].tolist()]
        if values[-1] == "...":
            values = values[:-1] + ["00"] * (len(digits) - len(values) + 1)
        assert digits == values, name


@pytest.mark.parametrize("reconstruction", ["midpoint", "truncate"])
def test_files_of_this_version_never_change(tmp_path, reconstruction):
    """Golden bytes: if this fails, the format has changed, and its version; or only the encoder's choices."""
    write_example(tmp_path / "example", reconstruction)
    golden = GOLDEN / f"version2-{reconstruction}"
    names = sorted(path.name for path in golden.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "example").iterdir())
    for name in names:
        assert (tmp_path / "example" / name).read_bytes() == (golden / name).read_bytes(), name


def test_a_directory_of_version_1_is_refused_with_the_command_that_packs_anew():
    with pytest.raises(
        FormatError,
        match=r"format version '1', .* reads version '2'; .* `otaro pack "
        r"CHECKPOINT OUT`",
    ):
        NestedDirectory(GOLDEN / "version1")


def test_the_identity_is_the_digest_of_digests_that_the_page_defines(example):
    directory, _, _ = example
    nested = NestedDirectory(directory)
    nested.require(nested.finest)
    digests = nested.base.header.digests
    items = [str(nested.schema.group_size), nested.schema.reconstruction]
    for name in nested.schema.packed:
        items += [name, str(nested.schema.scale_exponents[name]), digests[name + ".scales"], digests[name]]
        items += [nested.plane(p).header.digests[name] for p in PLANES]
    packed = hashlib.sha256("".join(item + "\n" for item in items).encode()).hexdigest()
    text = f"{packed}\nnorm.weight\nBF16\n4\n{digests['norm.weight']}\n"
    assert nested.base.header.model == hashlib.sha256(text.encode()).hexdigest()


def test_data_starts_at_a_multiple_of_64_bytes(example):
    directory, _, _ = example
    for shard in directory.glob("*.safetensors"):
        assert (8 + int.from_bytes(shard.read_bytes()[:8], "little")) % 64 == 0
