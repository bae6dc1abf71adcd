"""Whether an installed wheel has a C++ extension that computes: the test of wheels, which needs no torch.

    python runs/check_wheel.py

cibuildwheel runs it on every wheel. It needs numpy, and ends with 1 if the extension is missing or wrong.
"""

from __future__ import annotations

import sys

import numpy as np


def main() -> int:
    from otaro import __version__
    from otaro.kernels import _cpu

    names = _cpu.available()
    print(f"otaro {__version__} with {_cpu.__file__}; this CPU can run {', '.join(names)}")
    x = np.linspace(-1, 1, 128, dtype=np.float32)[None]
    found = set()
    for name in names:  # activations as 16-bit integers: the same ones from every instruction set
        _cpu.choose(name)
        codes, scales = np.zeros((1, 128), np.int16), np.zeros((1, 128 // _cpu.unit_size(64)), np.float32)
        _cpu.quantize(x, 64, codes, scales)
        found.add((codes.tobytes(), scales.tobytes()))
        back = codes.reshape(-1, 64) * scales.reshape(-1, 1)
        if np.abs(back.reshape(1, -1) - x).max() > 2**-15:  # half a step of 15 bits, at the most
            print(f"{name}: quantize is off")
            return 1
    return 0 if len(found) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
