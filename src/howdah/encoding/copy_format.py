"""Jobs in the text format of COPY: half the work of JSON, for the server and for the client (decision 0014)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from howdah.model import NewJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# COPY writes columns as they are. For these, `enqueue_jobs` computes a due time or looks up a key.
_NOT_COPIED = {"run_at", "delay", "idempotency_key", "idempotency_ttl", "ordering_key"}
_COMMON = tuple(field for field in NewJob.__struct_fields__ if field not in {*_NOT_COPIED, "data"})
_DEFAULTS = NewJob(job_type="")
COLUMNS = ("id", "data", *_COMMON)
"""The columns that `encode_lines` fills. A job with other fields is not copied."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows for a table, in the text format of COPY."""

    schema: str
    table: str
    columns: tuple[str, ...]
    lines: Iterable[bytes]


def encode_lines(jobs: Iterable[Mapping[str, Any]]) -> bytes:
    """Encoded jobs in the text format of COPY, one per line."""
    lines = []
    for job in jobs:
        data = bytes(job["data"])
        if b"\\" in data:
            data = data.replace(b"\\", b"\\\\")
        common = _encode_common(*map(job.get, _COMMON))
        lines.append(b"%032x\t%b\t%b" % (job["id"].int, data, common))
    return b"".join(lines)


@functools.lru_cache(maxsize=1024)
def _encode_common(*values: str | int | None) -> bytes:
    """The end of a line, which is the same for most jobs of one task."""
    filled = (
        getattr(_DEFAULTS, name) if each is None else each
        for name, each in zip(_COMMON, values, strict=True)
    )
    return b"\t".join(map(_encode_value, filled)) + b"\n"


def _encode_value(value: object) -> bytes:
    if value is None:
        return b"\\N"
    text = str(value)
    for character, escape in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escape)
    return text.encode()
