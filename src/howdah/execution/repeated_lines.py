"""Limits how often a worker logs the same thing: the first line of a kind is logged at once, and repeats within a
minute are counted instead. The next line, or a summary, says how many were left out.

A failing job type logged a line per attempt, and a part without a connection a line per second."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from howdah.encoding.payload import format_error
from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from howdah.encoding.safe_logger import SafeLogger
    from howdah.hooks import StateChange

logger = get_logger(__name__)

PERIOD_SECONDS = 60.0
MAX_KINDS = 1000  # remembered at once: names of job types and errors are not ours

_VARIABLE = re.compile(
    r"""0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+|'[^']*'|"[^"]*\"""", re.IGNORECASE
)


def shape_of(error: str) -> str:
    """An error without what differs from one occurrence to the next: numbers, ids and quoted values."""
    return _VARIABLE.sub("…", error[:500])[:200]


@dataclass(slots=True)
class _Line:
    since: float
    logger: SafeLogger
    level: int
    message: str
    fields: Mapping[str, object]
    left_out: int = 0


class RepeatedLines:
    """The lines of one worker. Safe to use from its event loop and its heartbeat's thread."""

    def __init__(self, period: float = PERIOD_SECONDS) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._lines: dict[Hashable, _Line] = {}

    def log(
        self,
        logger: SafeLogger,
        level: int,
        message: str,
        *,
        kind: Hashable,
        fields: Mapping[str, object],
        always: bool = False,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log a line unless one of its kind was logged in the last minute; `always` logs it anyway."""
        now = time.monotonic()
        with self._lock:
            line = self._lines.get(kind)
            if line is not None and now - line.since < self._period and not always:
                line.left_out += 1
                return
            left_out = 0 if line is None else line.left_out
            self._lines.pop(kind, None)
            if len(self._lines) >= MAX_KINDS:
                self._summarize(self._lines.pop(next(iter(self._lines))))
            self._lines[kind] = _Line(now, logger, level, message, fields)
        more = {"left_out": left_out} if left_out else {}
        logger.log(level, message, exc_info=exc_info, extra={**fields, **more})

    def forget(self, kind: Hashable) -> int:
        """Log the next line of this kind at once. Returns how many were left out."""
        with self._lock:
            line = self._lines.pop(kind, None)
        return 0 if line is None else line.left_out

    def summarize(self, *, everything: bool = False) -> None:
        """Log the number of lines that were left out, of the kinds whose minute is over."""
        now = time.monotonic()
        with self._lock:
            over = [
                kind
                for kind, line in self._lines.items()
                if everything or now - line.since >= self._period
            ]
            for kind in over:
                self._summarize(self._lines.pop(kind))

    def _summarize(self, line: _Line) -> None:
        if line.left_out:
            shared = {name: line.fields[name] for name in line.fields if name not in _OF_ONE_JOB}
            line.logger.log(
                line.level,
                "similar lines were left out",
                extra={"line": line.message, "left_out": line.left_out, **shared},
            )


_OF_ONE_JOB = frozenset({"job_id", "attempt"})


def report_hook(lines: RepeatedLines, change: StateChange, error: BaseException) -> None:
    """Log what a state-change hook has raised."""
    lines.log(
        logger, logging.WARNING, "state-change hook failed",
        kind=("hook", type(error), shape_of(format_error(error))),
        fields={"job_id": str(change.id), "job_type": change.job_type}, exc_info=error,
    )  # fmt: skip


class Outages:
    """Logs that the database cannot be used: once for all parts of a worker, until it can be used again."""

    def __init__(self, lines: RepeatedLines) -> None:
        self._lines = lines
        self._reported: set[type[BaseException]] = set()

    def report(self, logger: SafeLogger, message: str, error: BaseException) -> None:
        """Log a failure, unless any part has logged one of its type."""
        kind = type(error)
        self._reported.add(kind)
        self._lines.log(
            logger, logging.WARNING, message, kind=("database", kind), fields={"error": str(error)}
        )

    def end(self, logger: SafeLogger) -> None:
        """Log that the database can be used again, if a failure was logged."""
        if self._reported:
            kinds, self._reported = self._reported, set()
            left_out = sum(self._lines.forget(("database", kind)) for kind in kinds)
            logger.info("database reachable again", extra={"left_out": left_out})
