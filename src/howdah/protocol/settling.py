"""Acknowledges jobs until it is certain whether each was accepted.

The lease of a rejected job is lost, or another transaction has locked the row, for example to cancel the job, and may
still roll back. Only `held_jobs` can tell which (decision 0004). No I/O: the backends run the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from uuid import UUID

    from howdah.protocol.statements import Statement, Statements

Steps: TypeAlias = "Generator[Statement[Any] | None, Any, Settled]"
"""Yields statements to run, and None to wait before the next one. The answer to None is whether time is left."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of the jobs that were not accepted."""

    lost: frozenset[UUID] = frozenset()
    locked: frozenset[UUID] = frozenset()
    """The lease is not lost, and the row stayed locked until no time was left."""
    in_doubt: bool = False
    """A statement was sent again because it was not answered: the first send may have ended the jobs that are lost."""


def settle(
    statements: Statements,
    ids: Sequence[UUID],
    fences: Sequence[UUID],
    build: Callable[[Sequence[int]], Statement[list[UUID]]],
) -> Steps:
    """Acknowledge all jobs, and then again those that are locked. `build` returns the statement for the jobs at the
    given places of `ids`."""
    lost: set[UUID] = set()
    places = list(range(len(ids)))
    is_in_doubt = False

    def form(at: Sequence[int]) -> Statement[list[UUID]]:
        """The statement, or after a send without an answer its idempotent form: that send may still run."""
        statement = build(at)
        again = statement.resend

        def resend() -> Statement[list[UUID]]:
            nonlocal is_in_doubt
            is_in_doubt = True
            return statement if again is None else again()

        return replace(statement if again is None or not is_in_doubt else again(), resend=resend)

    while True:
        accepted = set((yield form(places)))
        places = [n for n in places if ids[n] not in accepted]
        if not places:
            return Settled(frozenset(lost), in_doubt=is_in_doubt)
        held = set(
            (yield statements.held_jobs([ids[n] for n in places], [fences[n] for n in places]))
        )
        gone = [n for n in places if (ids[n], fences[n]) not in held]
        if gone and is_in_doubt:
            # A send without an answer may have ended between the two: what it wrote counts as this one's.
            again = set((yield form(gone)))
            gone = [n for n in gone if ids[n] not in again]
        lost.update(ids[n] for n in gone)
        places = [n for n in places if (ids[n], fences[n]) in held]
        if not places:
            return Settled(frozenset(lost), in_doubt=is_in_doubt)
        if not (yield None):
            return Settled(frozenset(lost), frozenset(ids[n] for n in places), is_in_doubt)
