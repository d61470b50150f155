"""Finds jobs by conditions, page by page, and by a part of their id. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from howdah.errors import HowdahError, InvalidOption, JobNotFound
from howdah.insight.filters import conjunction
from howdah.insight.reader import QueueReader
from howdah.protocol.filters import Filters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from howdah.insight.filters import Condition
    from howdah.model import Job
    from howdah.protocol.statements import Rows

MIN_CHARACTERS = 4
MAX_CANDIDATES = 5


class NoSuchJob(HowdahError, LookupError):
    """No job's id begins or ends with the text."""

    def __init__(self, part: str) -> None:
        super().__init__(
            f'no job\'s id begins or ends with "{part}"; it may have been cleared after its retention.'
        )


class AmbiguousId(HowdahError, LookupError):
    """The ids of several jobs begin or end with the text."""

    def __init__(self, part: str, found: Sequence[Candidate]) -> None:
        self.found = tuple(found[:MAX_CANDIDATES])
        more = " and more" if len(found) > MAX_CANDIDATES else ""
        names = ", ".join(f"{each.id} ({each.job_type}, {each.status})" for each in self.found)
        super().__init__(f'"{part}" matches several jobs; type more of the id: {names}{more}.')


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job whose id matches a part of an id."""

    id: UUID
    job_type: str
    status: str
    created_at: datetime


class Search(QueueReader):
    """Finds jobs."""

    def jobs(
        self, conditions: Sequence[Condition], limit: int, before: UUID | None = None
    ) -> list[Job]:
        """Jobs that meet every condition, newest first; with `before`, only older ones."""
        where, values = conjunction(conditions)
        if before is not None:
            values.append(before)
            where += f" AND id < ${len(values)}::uuid"
        values.append(limit)
        ids: list[UUID] = self._fetch(
            f"SELECT id FROM {{s}}.jobs WHERE {where} ORDER BY id DESC LIMIT ${len(values)}::int",
            *values,
            decode=_ids,
        )
        if not ids:
            return []
        found = self._run(self._statements.find(Filters(ids=ids), limit))
        # The fence is for the worker that claimed the job.
        return [msgspec.structs.replace(job, lease_id=None) for job in found]

    def count(self, conditions: Sequence[Condition]) -> tuple[int, UUID | None]:
        """How many jobs meet every condition, and the newest of them."""
        where, values = conjunction(conditions)
        count: int = self._fetch(
            f"SELECT count(*) FROM {{s}}.jobs WHERE {where}",
            *values,
            decode=lambda rows: rows[0][0],
        )
        newest: list[UUID] = self._fetch(
            f"SELECT id FROM {{s}}.jobs WHERE {where} ORDER BY id DESC LIMIT 1",
            *values,
            decode=_ids,
        )
        return count, newest[0] if newest else None

    def batches(
        self, conditions: Sequence[Condition], newest: UUID, size: int
    ) -> Iterator[list[UUID]]:
        """The ids of jobs that meet every condition, up to `newest`, oldest first. Each batch is read when
        it is needed, and no id is returned twice, whatever changes the jobs in between."""
        where, values = conjunction(conditions)
        n = len(values)
        last = UUID(int=0)
        while True:
            ids: list[UUID] = self._fetch(
                f"SELECT id FROM {{s}}.jobs WHERE {where} AND id > ${n + 1}::uuid "
                f"AND id <= ${n + 2}::uuid ORDER BY id LIMIT ${n + 3}::int",
                *values,
                last,
                newest,
                size,
                decode=_ids,
            )
            if not ids:
                return
            last = ids[-1]
            yield ids

    def resolve(self, part: str) -> UUID:
        """The id of the job whose id is, begins with or ends with `part`."""
        digits = part.strip().lower().replace("-", "")
        if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
            raise InvalidOption(f'"{part}" is not a job id, nor the beginning or the end of one.')
        if len(digits) < MIN_CHARACTERS:
            raise InvalidOption(
                f'"{part}" is too short for a job id; type at least {MIN_CHARACTERS} characters of its '
                "beginning or end."
            )
        low, high = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
        found = self._candidates("id BETWEEN $1::uuid AND $2::uuid", low, high)
        if len(digits) == 32 and not found:
            raise JobNotFound(low)
        if not found:
            found = self._candidates(
                "right(replace(id::text, '-', ''), $1::int) = $2::text", len(digits), digits
            )
        if not found:
            raise NoSuchJob(part)
        if len(found) > 1:
            raise AmbiguousId(part, found)
        return found[0].id

    def _candidates(self, where: str, *values: Any) -> list[Candidate]:
        return self._fetch(
            f"SELECT id, job_type, status, created_at FROM {{s}}.jobs WHERE {where} "
            f"ORDER BY id DESC LIMIT {MAX_CANDIDATES + 1}",
            *values,
            decode=lambda rows: [Candidate(*row) for row in rows],
        )


def _ids(rows: Rows) -> list[UUID]:
    return [row[0] for row in rows]
