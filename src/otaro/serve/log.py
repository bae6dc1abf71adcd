"""Lines of JSON on standard error. No prompt and no answer is in them unless asked for."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("otaro.serve")


class JsonLines(logging.Formatter):
    """A record as one line; what is given as `extra={"fields": {...}}` becomes fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            # An error's message may quote what was asked; where it happened is enough.
            line["error"] = record.exc_info[0].__name__
            line["at"] = _frames(record.exc_info[2])
        return json.dumps(line)


def _frames(trace: Any) -> list[str]:
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename.rpartition('site-packages/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return frames


def start() -> None:
    """Our lines, and uvicorn's warnings in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (
        ("otaro.serve", logging.INFO),
        ("uvicorn.error", logging.WARNING),
        ("asyncio", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def event(name: str, **fields: Any) -> None:
    """One line."""
    log.info(name, extra={"fields": fields})
