"""Formats log lines: readable text for people, or one JSON object per line for programs. `howdah worker` sets this up
in its own process and in its task processes; a program that runs a `Worker` sets up its own logging."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from howdah.encoding.safe_logger import get_logger
from howdah.encoding.visible_text import clean_block, clean_line

if TYPE_CHECKING:
    from types import TracebackType

logger = get_logger(__name__)

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
    """Formats a record as `12:34:56 worker started  queues=['default'] tasks=3`.

    An error's text may come from anyone. It stays on its line, and the lines of a traceback are indented."""

    def __init__(self, *, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = clean_line(record.getMessage())
        fields = "  ".join(f"{key}={clean_line(value)}" for key, value in _fields(record).items())
        if self._color:
            text = f"\x1b[{_COLORS.get(record.levelname, '1')}m{text}\x1b[0m"
            at, fields = f"\x1b[2m{at}\x1b[0m", f"\x1b[2m{fields}\x1b[0m" if fields else ""
        elif record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        line = f"{at} {text}" + (f"  {fields}" if fields else "")
        if record.exc_info:
            line += "\n" + clean_block(self.formatException(record.exc_info), "    ")
        return line


def set_up_logging(level: str, *, as_json: bool, color: bool) -> None:
    """Send every log line to stderr in one of the two formats, also warnings and the tracebacks of exceptions that
    nothing catches: handlers start threads, and errors have texts of others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else HumanFormatter(color=color))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    sys.unraisablehook = _log_unraisable


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        _log("exception in a thread", args.exc_value, args.exc_traceback)


def _log_unraisable(args: sys.UnraisableHookArgs) -> None:
    # Without the object: its `repr` is a handler's code too. The traceback has the place.
    _log("exception ignored", args.exc_value, args.exc_traceback)


def _log(message: str, error: BaseException | None, traceback: TracebackType | None) -> None:
    exc_info = None if error is None else (type(error), error, traceback)
    logger.error(message, exc_info=exc_info)
