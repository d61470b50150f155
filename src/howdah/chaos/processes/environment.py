"""What the supervisor of a chaos run and its processes agree on: variables, names, and how a process stops."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

from howdah.chaos import ledger

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA_VARIABLE = "HOWDAH_CHAOS_SCHEMA"
LEASE_VARIABLE = "HOWDAH_CHAOS_LEASE"
COMMAND_TIMEOUT_SECONDS = 3.0
"""Seconds that bare queues wait for a reply: work must resume within five."""
BARE = "chaos.bare"
"""The job type that only bare queue workers claim."""
EFFECTS = "chaos_effects"
"""The table of rows that handlers write together with their completion."""

REPORT = "chaos-report"
"""The kind of the event that a run reports, with its fence as data."""


def required_ledger() -> ledger.Ledger:
    """The ledger of the run that started this process."""
    found = ledger.from_environment()
    if found is None:
        raise SystemExit(
            f"this process is part of a chaos run: {ledger.LEDGER_VARIABLE} is not set."
        )
    return found


def start_logging(name: str, message: str, *, on_stop: Callable[[], None]) -> None:
    """Call `on_stop` at SIGTERM, and log the message by which the supervisor detects that a process started."""
    signal.signal(signal.SIGTERM, lambda number, frame: on_stop())
    logging.basicConfig(level=logging.INFO)
    logging.getLogger(name).info(message)
