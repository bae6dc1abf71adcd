"""OTARo: tune a language model once, store it once, run it at every precision from E5M8 to E5M3.

>>> import otaro
>>> model = otaro.load("my-model-sefp", precision="E5M4")                    # doctest: +SKIP
>>> otaro.set_precision(model, "E5M8")                                       # doctest: +SKIP

Importing this package registers the transformers plug-in, so that `AutoModelForCausalLM.from_pretrained`
opens nested directories. Names are imported when they are first used: the import itself needs neither torch
nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from otaro import _plugin
from otaro.errors import OtaroError

if TYPE_CHECKING:
    from otaro.runtime.engine import Engine
    from otaro.runtime.hf import SefpConfig
    from otaro.runtime.load import load
    from otaro.runtime.pack import pack
    from otaro.runtime.precision import at_precision, precisions_of, set_precision, trim
    from otaro.runtime.sample import Sampling
    from otaro.sefp.codec import SefpTensor, encode
    from otaro.sefp.precision import PRECISIONS, Precision

__version__ = "0.2.0"

_HOME = {
    "Precision": "otaro.sefp.precision",
    "PRECISIONS": "otaro.sefp.precision",
    "encode": "otaro.sefp.codec",
    "SefpTensor": "otaro.sefp.codec",
    "pack": "otaro.runtime.pack",
    "load": "otaro.runtime.load",
    "set_precision": "otaro.runtime.precision",
    "at_precision": "otaro.runtime.precision",
    "precisions_of": "otaro.runtime.precision",
    "trim": "otaro.runtime.precision",
    "SefpConfig": "otaro.runtime.hf",
    "Engine": "otaro.runtime.engine",
    "Sampling": "otaro.runtime.sample",
}

__all__ = [
    "PRECISIONS",
    "Engine",
    "OtaroError",
    "Precision",
    "Sampling",
    "SefpConfig",
    "SefpTensor",
    "at_precision",
    "encode",
    "load",
    "pack",
    "precisions_of",
    "set_precision",
    "trim",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'otaro' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_plugin.register_with_transformers()
