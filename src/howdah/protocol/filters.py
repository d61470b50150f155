"""Which jobs `find` returns, as a WHERE clause and its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which jobs `find` returns: each filter with its SQL condition. None and () match every job."""

    status: Sequence[str] = field(default=(), metadata={"sql": "status = ANY ({}::text[])"})
    job_type: Sequence[str] = field(default=(), metadata={"sql": "job_type = ANY ({}::text[])"})
    queue: Sequence[str] = field(default=(), metadata={"sql": "queue = ANY ({}::text[])"})
    ids: Sequence[UUID] = field(default=(), metadata={"sql": "id = ANY ({}::uuid[])"})
    request_id: str | None = field(default=None, metadata={"sql": "request_id = {}::text"})
    ordering_key: str | None = field(default=None, metadata={"sql": "ordering_key = {}::text"})
    worker_id: str | None = field(default=None, metadata={"sql": "worker_id = {}::text"})
    data: str | None = field(default=None, metadata={"sql": "data @> {}::text::jsonb"})
    before: UUID | None = field(default=None, metadata={"sql": "id < {}::uuid"})

    def where(self) -> tuple[str, list[Any]]:
        """The WHERE clause, empty if every job matches, and its parameters."""
        conditions: list[str] = []
        values: list[Any] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value in (None, (), []):
                continue
            values.append(value if isinstance(value, str | UUID) else list(value))
            conditions.append(each.metadata["sql"].format(f"${len(values)}"))
        return f"WHERE {' AND '.join(conditions)} " if conditions else "", values
