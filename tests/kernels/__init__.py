"""`make sanitize` names another build of the extension in OTARO_CPU_MODULE: it takes the place of the installed one.

That has to happen before anybody imports `otaro.kernels.cpu`, hence here.
"""

import importlib.util
import os
import sys

SANITIZED = os.environ.get("OTARO_CPU_MODULE")

if SANITIZED:
    _spec = importlib.util.spec_from_file_location("otaro.kernels._cpu", SANITIZED)
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    sys.modules["otaro.kernels._cpu"] = _module
