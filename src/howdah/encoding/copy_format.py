"""Jobs as COPY reads them in its text format: half the work of JSON, for the server and for us."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_COMMON = (
    "job_type", "queue", "priority", "max_attempts", "request_id", "traceparent", "keep",
)  # fmt: skip
_DEFAULTS = {"queue": "default", "priority": 100, "max_attempts": 3}
COLUMNS = ("id", "data", *_COMMON)
"""The columns that `encode_lines` fills. A job with other fields is not copied."""


def encode_lines(jobs: Iterable[Mapping[str, Any]]) -> bytes:
    """Encoded jobs as COPY reads them in its text format, one on each line."""
    lines = []
    for job in jobs:
        data = bytes(job["data"])
        if b"\\" in data:
            data = data.replace(b"\\", b"\\\\")
        common = _common(*map(job.get, _COMMON))
        lines.append(b"%032x\t%b\t%b" % (job["id"].int, data, common))
    return b"".join(lines)


@functools.lru_cache(maxsize=1024)
def _common(*values: str | int | None) -> bytes:
    """The end of a line, which the jobs of one task have in common."""
    filled = (
        _DEFAULTS.get(name) if each is None else each
        for name, each in zip(_COMMON, values, strict=True)
    )
    return b"\t".join(map(_copied, filled)) + b"\n"


def _copied(value: object) -> bytes:
    if value is None:
        return b"\\N"
    text = str(value)
    for character, escape in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escape)
    return text.encode()
