"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Gets what is being done, and how much of it is done and in total."""
Count = Callable[[int, int], None]
"""Gets how much is done and in total."""
