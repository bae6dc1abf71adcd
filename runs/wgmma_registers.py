"""Whether a compiler's hopper.cu writes to registers that the matrix units still read.

    python runs/wgmma_registers.py

`wgmma` reads its registers until it is waited for. PTX that keeps to this became machine code that did not (docs/log.md), so
every form of the kernel is compiled by the NVRTC at hand and searched, between each product and its wait. No GPU is needed, but
`nvdisasm` on the PATH. Exits with 1 if anything was found; a compiler without findings may join `hopper.COMPILERS`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product

from otaro.kernels import hopper, nvrtc
from otaro.sefp.precision import PRECISIONS

_INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;")
_PRODUCT = re.compile(r"IGMMA\.64x(\d+)x32\S* R(\d+), R(\d+), gdesc")
_WRITES = re.compile(r"([A-Z0-9_.]+) (?:P\d+, )?R(\d+)\b")
_NO_WRITES = ("ST", "RED", "SYNCS", "LDGSTS")  # their first register is an address, or read
_WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}


def main() -> None:
    found = forms = 0
    for precision, truncate, tokens, stages in product(PRECISIONS, (0, 1), hopper.TOKENS, range(3, 9)):
        constants = {"BITS": precision.mantissa_bits, "TRUNCATE": truncate, "TOKENS": tokens, "STAGES": stages}
        writes = list(in_flight(machine_code(constants)))
        forms, found = forms + 1, found + bool(writes)
        for one in writes[:3]:
            print(f"{constants}: {one}", flush=True)
    print(f"{nvrtc.compiler()}: {found} of {forms} forms write to registers that are still read")
    sys.exit(found > 0)


def machine_code(constants: dict[str, int]) -> str:
    given = (f"-D{name}={value}" for name, value in constants.items())
    flags = ("--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization", *given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(nvrtc.compile_source(nvrtc.HOPPER, nvrtc.source_of(nvrtc.HOPPER), flags))
        file.flush()
        return subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout


def in_flight(code: str) -> Iterator[str]:
    """Instructions that write to what a product before them reads or adds to."""
    read: set[int] = set()
    for instruction in _INSTRUCTION.findall(code):
        if multiplied := _PRODUCT.match(instruction):
            columns, sums, weights = map(int, multiplied.groups())
            read |= {*range(weights, weights + 4), *range(sums, sums + columns // 2)}
        elif instruction.startswith(("WARPGROUP.DEPBAR", "EXIT")):
            read.clear()
        elif (written := _WRITES.match(instruction)) and not written[1].startswith(_NO_WRITES):
            width = next((count for mark, count in _WIDTHS.items() if mark in written[1]), 1)
            if read & set(range(int(written[2]), int(written[2]) + width)):
                yield instruction


if __name__ == "__main__":
    main()
