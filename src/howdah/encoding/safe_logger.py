"""The loggers of Howdah. A log call runs handlers, filters and a record factory of the program, and any of them may
raise. A log call of ours never raises: it must not end the part of a worker that makes it."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs to the standard logger of its name. The first line that is lost is reported on the standard error."""

    _lost = False

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log a line, unless the program's logging raises."""
        try:
            if self.logger.isEnabledFor(level):
                # 2: the record names the caller of this method.
                self.logger.log(level, msg, *args, stacklevel=2, **options)
        except Exception as error:
            _report(msg, error)


def get_logger(name: str) -> SafeLogger:
    """The logger of a module of Howdah."""
    return SafeLogger(logging.getLogger(name), {})


def _report(message: object, error: Exception) -> None:
    if SafeLogger._lost or sys.__stderr__ is None:
        return
    SafeLogger._lost = True
    with contextlib.suppress(Exception):
        sys.__stderr__.write(
            f"howdah: logging raised {type(error).__name__}; this and later lines may be lost: {message}\n"
        )
        sys.__stderr__.flush()
