"""Formats log lines: readable text for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLORS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1", "DEBUG": "2"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class HumanFormatter(logging.Formatter):
    """Formats a record as `12:34:56 worker started  queues=['default'] tasks=3`."""

    def __init__(self, *, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        fields = "  ".join(f"{key}={value}" for key, value in _fields(record).items())
        if self._color:
            text = f"\x1b[{_COLORS.get(record.levelname, '1')}m{text}\x1b[0m"
            at, fields = f"\x1b[2m{at}\x1b[0m", f"\x1b[2m{fields}\x1b[0m" if fields else ""
        elif record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        line = f"{at} {text}" + (f"  {fields}" if fields else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up_logging(level: str, *, as_json: bool, color: bool) -> None:
    """Send every log line to stderr in one of the two formats."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else HumanFormatter(color=color))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
