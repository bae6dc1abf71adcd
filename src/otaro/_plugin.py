"""Registers the transformers plug-in without importing transformers.

`import otaro` must make nested directories loadable through transformers, yet importing transformers' models
takes seconds that many uses of this package do not need. So if their base class is not loaded yet, a finder
waits for its import and lets `otaro.runtime.hf` register itself right after it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_AWAITED = "transformers.modeling_utils"
_PLUGIN = "otaro.runtime.hf"


class _ThenRegister(importlib.abc.Loader):
    """Runs the awaited module as its own loader would, then imports the plug-in."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(_PLUGIN)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def register_with_transformers() -> None:
    """Register now if transformers' base class of models is loaded, else as soon as it is."""
    if _AWAITED in sys.modules:
        importlib.import_module(_PLUGIN)
    else:
        sys.meta_path.insert(0, _Finder())
