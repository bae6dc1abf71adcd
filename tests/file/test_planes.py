"""The order of bits in a nested file: pinned bytes, the formulas of the format read aloud in plain Python."""

from __future__ import annotations

import pytest
import torch

from otaro.file.planes import (
    blocks,
    pack_codes,
    unpack_codes,
)
from otaro.sefp.precision import PRECISIONS

LENGTHS = range(1, 131)


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(-256, 256, shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        torch.int16
    )


def raw(tensor: torch.Tensor) -> bytes:
    assert tensor.dtype == torch.uint8
    return bytes(tensor.flatten().tolist())


def packed_by_formula(codes: list[int]) -> tuple[bytes, list[bytes]]:
    """One row: base byte 4w+b holds weight 8w+b in its low and weight 8w+4+b in its high nibble; a plane's
    little-endian word holds the bit of weight 8w+4i+b at position 8b+2w+i. Stored is u = code + 256, and zero
    beyond the row."""
    stored = [code + 256 for code in codes] + [0] * (-len(codes) % 32)
    base, planes = b"", [b""] * 5
    for start in range(0, len(stored), 32):
        u = stored[start : start + 32]
        block, words = [0] * 16, [0] * 5
        for w in range(4):
            for b in range(4):
                block[4 * w + b] = (u[8 * w + b] // 32) + 16 * (u[8 * w + 4 + b] // 32)
                for i in range(2):
                    for k in range(5):  # plane 4 + k
                        bit = u[8 * w + 4 * i + b] // 2 ** (4 - k) % 2
                        words[k] += bit * 2 ** (8 * b + 2 * w + i)
        base += bytes(block)
        planes = [plane + word.to_bytes(4, "little") for plane, word in zip(planes, words, strict=True)]
    return base, planes


def block_with(position: int, u: int) -> torch.Tensor:
    """One block that is zero bits but for one weight."""
    codes = torch.full((32,), -256, dtype=torch.int16)
    codes[position] += u
    return codes


# Codes


@pytest.mark.parametrize("length", LENGTHS)
def test_a_packed_row_is_what_the_formula_says_and_comes_back(length):
    codes = random_codes(length)
    base, planes = pack_codes(codes)
    assert (raw(base), [raw(plane) for plane in planes]) == packed_by_formula(codes.tolist())
    assert torch.equal(unpack_codes(base, planes, length), codes)


@pytest.mark.parametrize(
    "shape", [(5, 70), (2, 3, 33), (1, 2, 3, 64), (1, 1)], ids=lambda s: f"rank {len(s)} {s}"
)
def test_leading_dimensions_stay_and_rows_are_packed_one_by_one(shape):
    codes = random_codes(*shape)
    base, planes = pack_codes(codes)
    count = blocks(shape[-1])
    assert base.shape == (*shape[:-1], 16 * count)
    assert [plane.shape for plane in planes] == [(*shape[:-1], 4 * count)] * 5
    assert torch.equal(unpack_codes(base, planes, shape[-1]), codes)
    rows = [packed_by_formula(row.tolist()) for row in codes.reshape(-1, shape[-1])]
    assert raw(base) == b"".join(row[0] for row in rows)
    assert [raw(plane) for plane in planes] == [b"".join(row[1][k] for row in rows) for k in range(5)]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100, 130])
def test_the_first_planes_alone_give_the_shifted_codes(length, precision):
    codes, m = random_codes(4, length), precision.mantissa_bits
    base, planes = pack_codes(codes)
    got = unpack_codes(base, planes[: m - 3], length)
    assert got.dtype == torch.int16
    assert torch.equal(got, codes >> (8 - m))


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_every_code_survives_at_every_position(precision):
    codes = torch.arange(-256, 256, dtype=torch.int16)
    codes = torch.stack([codes.roll(by) for by in range(32)])
    base, planes = pack_codes(codes)
    m = precision.mantissa_bits
    assert torch.equal(unpack_codes(base, planes[: m - 3], 512), codes >> (8 - m))


@pytest.mark.parametrize("position", range(32))
def test_each_bit_of_a_weight_has_one_place(position):
    w, i, b = position // 8, position // 4 % 2, position % 4
    for bit in range(9):
        base, planes = pack_codes(block_with(position, 1 << bit))
        word = int.from_bytes(raw(base), "little")
        words = [int.from_bytes(raw(plane), "little") for plane in planes]
        if bit >= 5:  # the top four bits of u are the nibble: byte 4w+b, its high half for i = 1
            assert word == 1 << (8 * (4 * w + b) + 4 * i + bit - 5)
            assert words == [0] * 5
        else:  # bit 4 of u is plane 4, bit 0 is plane 8
            assert word == 0
            assert words == [1 << (8 * b + 2 * w + i) if bit == 4 - k else 0 for k in range(5)]


@pytest.mark.parametrize(
    ("position", "base", "plane"),
    [
        (0, "0f 00 00 00  00 00 00 00  00 00 00 00  00 00 00 00", "01 00 00 00"),
        (1, "00 0f 00 00  00 00 00 00  00 00 00 00  00 00 00 00", "00 01 00 00"),
        (3, "00 00 00 0f  00 00 00 00  00 00 00 00  00 00 00 00", "00 00 00 01"),
        (4, "f0 00 00 00  00 00 00 00  00 00 00 00  00 00 00 00", "02 00 00 00"),
        (8, "00 00 00 00  0f 00 00 00  00 00 00 00  00 00 00 00", "04 00 00 00"),
        (14, "00 00 00 00  00 00 f0 00  00 00 00 00  00 00 00 00", "00 00 08 00"),
        (17, "00 00 00 00  00 00 00 00  00 0f 00 00  00 00 00 00", "00 10 00 00"),
        (31, "00 00 00 00  00 00 00 00  00 00 00 00  00 00 00 f0", "00 00 00 80"),
    ],
)
def test_the_bytes_of_one_full_weight_among_empty_ones_are_pinned(position, base, plane):
    got, planes = pack_codes(block_with(position, 511))
    assert raw(got) == bytes.fromhex(base)
    assert [raw(p) for p in planes] == [bytes.fromhex(plane)] * 5


def test_the_bytes_of_a_block_of_ascending_codes_are_pinned():
    """Codes -256, -240, ... 240: u = 16 j, so the nibbles count 0 0 1 1 2 2 ... and plane 4 alone has bits,
    of odd weights.
    """
    base, planes = pack_codes(torch.arange(-256, 256, 16, dtype=torch.int16))
    assert raw(base) == bytes.fromhex("20 20 31 31  64 64 75 75  a8 a8 b9 b9  ec ec fd fd")
    assert [raw(plane) for plane in planes] == [bytes.fromhex("00 ff 00 ff")] + [bytes(4)] * 4


def test_the_bytes_of_a_short_row_are_pinned():
    """220, -61, 21 of the codec's worked example: u = 0b1110_11100, 0b0110_00011, 0b1000_10101."""
    base, planes = pack_codes(torch.tensor([220, -61, 21], dtype=torch.int16))
    assert raw(base) == bytes.fromhex("0e 06 08 00") + bytes(12)
    assert [raw(plane) for plane in planes] == [
        bytes.fromhex(text)
        for text in ("01 00 01 00", "01 00 00 00", "01 00 01 00", "00 01 00 00", "00 01 01 00")
    ]


@pytest.mark.parametrize("length", LENGTHS)
def test_padding_is_zero_bits(length):
    """Of a row of all ones, exactly four bits per weight are set in the base and one in each plane."""
    base, planes = pack_codes(torch.full((length,), 255, dtype=torch.int16))
    assert len(raw(base)) == 16 * blocks(length) == 16 * ((length + 31) // 32)
    assert int.from_bytes(raw(base), "little").bit_count() == 4 * length
    for plane in planes:
        assert len(raw(plane)) == 4 * blocks(length)
        assert int.from_bytes(raw(plane), "little").bit_count() == length


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 5)], ids=str)
def test_no_weights_take_no_bytes(shape):
    codes = torch.empty(shape, dtype=torch.int16)
    base, planes = pack_codes(codes)
    assert base.numel() == sum(plane.numel() for plane in planes) == 0
    assert unpack_codes(base, planes, shape[-1]).shape == shape


def test_packing_changes_nothing_and_memory_layout_does_not_matter():
    codes = random_codes(70, 40)
    before = codes.clone()
    base, planes = pack_codes(codes.T)
    assert torch.equal(codes, before)
    assert torch.equal(base, pack_codes(codes.T.contiguous())[0])
    kept = [tensor.clone() for tensor in (base, *planes)]
    spread = torch.zeros(40, 2 * base.shape[-1], dtype=torch.uint8)
    spread[:, : base.shape[-1]] = base
    assert torch.equal(unpack_codes(spread[:, : base.shape[-1]], planes, 70), codes.T)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((base, *planes), kept, strict=True))
