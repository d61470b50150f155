"""What a caller may pass for a job: the job, a handle, a claim, an id or its text, or several of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from howdah.errors import InvalidOption
from howdah.model import Claim, Handle, Job, JobRef

_ONE = Job | Handle | Claim | UUID | str


def to_id(ref: JobRef) -> UUID:
    """The id of a job, a handle, a claim, an id or the text of one."""
    if isinstance(ref, UUID):
        return ref
    if isinstance(ref, Job | Handle | Claim):
        return ref.id
    try:
        return UUID(ref)
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption(f"{ref!r:.100} is not a job id.") from None


def to_refs(refs: JobRef | Iterable[JobRef]) -> list[JobRef]:
    """One reference or several, as a list."""
    if isinstance(refs, _ONE):
        return [refs]
    if not isinstance(refs, Iterable):
        raise InvalidOption(f"{refs!r:.100} is not a job id.")
    return list(refs)


def spread(refs: Any, value: Any, n: int, name: str) -> list[Any]:
    """The values for `n` jobs: one value for one reference, and for several a list or None."""
    if isinstance(refs, _ONE):
        return [value]
    if value is None:
        return [None] * n
    if not isinstance(value, list) or len(value) != n:
        raise InvalidOption(f"{name} must be a list of {n} values, one for each job.")
    return value
