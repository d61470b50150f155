"""Processes with a wrong clock, by libfaketime (Debian's package)."""

from __future__ import annotations

from pathlib import Path

from python_path import with_python_path

HOUR = 3600


def library() -> Path | None:
    """The path of libfaketime, if it is installed: the variant for multithreaded processes, such as workers."""
    for pattern in ("lib/*/faketime/libfaketimeMT.so.1", "lib/faketime/libfaketimeMT.so.1"):
        for found in Path("/usr").glob(pattern):
            return found
    return None


MISSING = "libfaketime is not installed (apt-get install libfaketime)"


def off_by(seconds: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong by so many seconds. Its monotonic clock is right, as on a
    machine whose time was set wrong."""
    found = library()
    assert found is not None, MISSING
    return {
        "LD_PRELOAD": str(found),
        "FAKETIME": f"{seconds:+d}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": with_python_path(Path(__file__).parent / "wrong_clock"),
    }
