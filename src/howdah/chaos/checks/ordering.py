"""P7: order."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Finding, Judge, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import Case
    from howdah.chaos.history import Enqueue
    from howdah.chaos.ledger import Line


SLOW_ENQUEUE = 0.5
"""Seconds above which an enqueue was possibly written long before it was committed."""


class Order(Judge):
    """Ordering keys, priorities, and first come, first served."""

    def check(self, cases: Iterable[Case]) -> Iterator[Finding]:
        yield from self.ordering_keys()
        yield from self.first_come()

    def ordering_keys(self) -> Iterator[Finding]:
        """Jobs of one ordering key: one at a time, in the order in which they were enqueued."""
        keys: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for job, described, _ in self.history.acknowledged():
            if described["key"] is not None:
                keys[described["key"]].append((described["n"], job))
        for key, members in keys.items():
            ended: Line | None = None  # the latest end that was asked for, of those before
            for _, job in sorted(members):
                leases = self.history.jobs.get(job, [])
                claims = [lease.claim for lease in leases if lease.claim is not None]
                if claims and ended is not None and claims[0].t < asked_at(ended):
                    what = f'was claimed before the one before it, of key "{key}", had ended'
                    yield Finding("P7", job, what, numbers(claims[0], ended))
                for lease in leases:
                    for line in lease.accepted:
                        if line["final"]:
                            first = min([line, *lease.invoked], key=asked_at)
                            ended = max([x for x in (ended, first) if x], key=asked_at)

    def first_come(self) -> Iterator[Finding]:
        """Of one type, higher priority first and then first come, first served."""
        lanes: dict[tuple[str, str], list[tuple[Enqueue, str, int, Line]]] = defaultdict(list)
        for job, described, enqueue in self.history.acknowledged():
            claims = [x.claim for x in self.history.jobs.get(job, []) if x.claim is not None]
            plain = described["delay"] is None and described["key"] is None
            if not plain or described["unique"] or not claims or claims[0]["claims"] != 1:
                continue  # not due at once, or claimed before by somebody who never heard of it
            lane = described["type"], described["queue"]
            lanes[lane].append((enqueue, job, described["priority"], claims[0]))
        for members in lanes.values():
            yield from self._first_come(members)

    def _first_come(self, members: list[tuple[Enqueue, str, int, Line]]) -> Iterator[Finding]:
        by_answer = sorted(
            (e.answer.t, asked["asked"], job, priority, asked, e)
            for e, job, priority, asked in members
            if e.answer is not None and e.answer.t - e.invoked.t < SLOW_ENQUEUE
        )
        latest: dict[int, tuple[float, str, Line, Enqueue]] = {}
        position = 0
        for enqueue, job, priority, claim in sorted(members, key=lambda m: m[0].invoked.t):
            while position < len(by_answer) and by_answer[position][0] < enqueue.invoked.t:
                _, asked, other, level, line, before = by_answer[position]
                if level not in latest or asked > latest[level][0]:
                    latest[level] = asked, other, line, before
                position += 1
            for level, (asked, other, line, before) in latest.items():
                # A claim that a fault rolled back may have kept others from seeing the job.
                if level >= priority and asked > claim.t and not self._disturbed(before, claim.t):
                    what = f"was claimed before {other}, which was there before and goes first"
                    lines = numbers(before.answer, enqueue.invoked, claim, line)
                    yield Finding("P7", job, what, lines)

    def _disturbed(self, enqueue: Enqueue, until: float) -> bool:
        since = enqueue.invoked.t - self.lease
        return any(begin < until and end + 1.0 > since for begin, end in self.failing)


def asked_at(line: Line) -> float:
    asked: float = line.get("asked", line.t)
    return asked
