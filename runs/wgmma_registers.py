"""Whether a compiler's kernels for Hopper write to registers that the matrix units still read.

    python runs/wgmma_registers.py

`wgmma` reads its registers until it is waited for. PTX that keeps to this became machine code that did not
(docs/log.md), so every form of the kernels is compiled by the NVRTC at hand and searched, between each
product and its wait. No GPU is needed, but `nvdisasm` on the PATH. Exits with 1 if anything was found; a
compiler without findings may join `hopper.COMPILERS`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from otaro.kernels import hopper, hopper_halves, nvrtc
from otaro.sefp.precision import PRECISIONS

_INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;")
_PRODUCT = re.compile(r"[IH]GMMA\.64x(\d+)x\d+\S* R(\d+), R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)")
_WRITES = re.compile(r"([A-Z0-9_.]+) (?:P\d+, )?R(\d+)\b")
_NO_WRITES = ("ST", "RED", "SYNCS", "LDGSTS")  # their first register is an address, or read
_WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}
_SHARED = 227_328  # bytes that a launch may have
Form = tuple[str, dict[str, int]]


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(writes_of, forms()))
    for (file, constants), writes in results:
        for one in writes[:3]:
            print(f"{file} {constants}: {one}", flush=True)
    found = sum(bool(writes) for _, writes in results)
    print(f"{nvrtc.compiler()}: {found} of {len(results)} forms write to registers that are still read")
    sys.exit(found > 0)


def forms() -> Iterator[Form]:
    """All that may be served."""
    for precision, truncate in product(PRECISIONS, (0, 1)):
        meaning = {"BITS": precision.mantissa_bits, "TRUNCATE": truncate}
        for tokens, stages, streamed in product(hopper.TOKENS, hopper.STAGES, (0, 1)):
            yield "hopper.cu", meaning | {"TOKENS": tokens, "STAGES": stages, "STREAMED": streamed}
        ways = product(hopper_halves.COLUMNS, hopper_halves.GROUPS, (1, 4), (0, 1))
        for columns, groups, slices, arranged in ways:
            shape = hopper_halves.Shape(columns, groups, 0, slices).filling(_SHARED, precision.mantissa_bits)
            if hopper_halves.fits(shape):
                cut = {"COLUMNS": columns, "GROUPS": groups, "STAGES": shape.stages, "SLICES": slices}
                yield "hopper_halves.cu", meaning | cut | {"ARRANGED": arranged, "OUT": 1}


def writes_of(form: Form) -> tuple[Form, list[str]]:
    return form, list(in_flight(machine_code(*form)))


def machine_code(name: str, constants: dict[str, int]) -> str:
    given = (f"-D{name}={value}" for name, value in constants.items())
    flags = ("--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization", *given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(nvrtc.compile_source(name, nvrtc.source_of(name), flags))
        file.flush()
        return subprocess.check_output(["nvdisasm", "-c", file.name], text=True)


def in_flight(code: str) -> Iterator[str]:
    """Instructions that write to what a product before them reads or adds to."""
    groups: list[set[int]] = [set()]  # of products that are waited for together; the last is still growing
    for instruction in _INSTRUCTION.findall(code):
        if multiplied := _PRODUCT.match(instruction):
            columns, sums, weights = map(int, multiplied.groups())
            groups[-1] |= {*range(weights, weights + 4), *range(sums, sums + columns // 2)}
            if "gsb0" in instruction:
                groups.append(set())
        elif waited := _WAIT.match(instruction):
            *ended, growing = groups
            groups = [*ended[max(0, len(ended) - int(waited[1], 16)) :], growing]
        elif instruction.startswith("EXIT"):
            groups = [set()]
        elif (written := _WRITES.match(instruction)) and not written[1].startswith(_NO_WRITES):
            width = next((count for mark, count in _WIDTHS.items() if mark in written[1]), 1)
            if set().union(*groups) & set(range(int(written[2]), int(written[2]) + width)):
                yield instruction


if __name__ == "__main__":
    main()
