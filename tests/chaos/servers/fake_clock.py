"""Processes whose clock is wrong, by libfaketime (Debian's package)."""

from __future__ import annotations

from pathlib import Path

HOUR = 3600


def library() -> Path | None:
    """Where libfaketime is, if it is installed. The variant for threads, as workers have some."""
    for pattern in ("lib/*/faketime/libfaketimeMT.so.1", "lib/faketime/libfaketimeMT.so.1"):
        for found in Path("/usr").glob(pattern):
            return found
    return None


MISSING = "libfaketime is not installed (apt-get install libfaketime)"


def off_by(seconds: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong by so much. Its monotonic clock is right, as it
    is on a machine whose time was set wrong."""
    found = library()
    assert found is not None, MISSING
    return {
        "LD_PRELOAD": str(found),
        "FAKETIME": f"{seconds:+d}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).parent / "wrong_clock"),
    }
