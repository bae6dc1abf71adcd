"""Where what was built or fetched for pages lies, so that it is made once."""

import os
import sys
from pathlib import Path


def folder() -> Path:
    """As each system has it; `XDG_CACHE_HOME` names another place."""
    if kept := os.environ.get("XDG_CACHE_HOME"):
        home = Path(kept)
    else:
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return home / "otaro" / "web"
