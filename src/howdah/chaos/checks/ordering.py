"""P7: ordering keys, priorities, and the order of due times."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Check, Finding, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord
    from howdah.chaos.history import Enqueue
    from howdah.chaos.ledger import Line

SLOW_ENQUEUE_SECONDS = 0.5
"""An enqueue that took longer may have written its job long before it committed."""


class OrderingCheck(Check):
    """The order in which jobs are claimed."""

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        yield from self.ordering_keys()
        yield from self.claim_order()

    def ordering_keys(self) -> Iterator[Finding]:
        """Jobs under one ordering key run one at a time, in enqueue order."""
        keys: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for job, described, _ in self.history.acknowledged():
            if described["key"] is not None:
                keys[described["key"]].append((described["n"], job))
        for key, members in keys.items():
            ended: Line | None = None  # the latest end sent, among the preceding jobs
            for _, job in sorted(members):
                leases = self.history.jobs.get(job, [])
                claims = [lease.claim for lease in leases if lease.claim is not None]
                if claims and ended is not None and claims[0].t < sent_at(ended):
                    what = f'was claimed before the preceding job of ordering key "{key}" ended'
                    yield Finding("P7", job, what, numbers(claims[0], ended))
                for lease in leases:
                    for line in lease.accepted:
                        if line["final"]:
                            first = min([line, *lease.invoked], key=sent_at)
                            ended = max([x for x in (ended, first) if x], key=sent_at)

    def claim_order(self) -> Iterator[Finding]:
        """Jobs of one type: higher priority first, then in enqueue order."""
        lanes: dict[tuple[str, str], list[tuple[Enqueue, str, int, Line]]] = defaultdict(list)
        for job, described, enqueue in self.history.acknowledged():
            claims = [x.claim for x in self.history.jobs.get(job, []) if x.claim is not None]
            plain = described["delay"] is None and described["key"] is None
            if not plain or described["unique"] or not claims or claims[0]["claims"] != 1:
                continue  # not due at once, or claimed before by a worker that did not receive the reply
            lane = described["type"], described["queue"]
            lanes[lane].append((enqueue, job, described["priority"], claims[0]))
        for members in lanes.values():
            yield from self._claim_order(members)

    def _claim_order(self, members: list[tuple[Enqueue, str, int, Line]]) -> Iterator[Finding]:
        by_answer = sorted(
            (e.answer.t, asked["asked"], job, priority, asked, e)
            for e, job, priority, asked in members
            if e.answer is not None and e.answer.t - e.invoked.t < SLOW_ENQUEUE_SECONDS
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
                # A claim that a fault rolled back may have hidden the job from other claims, and a server
                # whose clock is wrong orders by that clock.
                if (
                    level >= priority
                    and asked > claim.t
                    and not self._hit_by_fault(before, claim.t)
                ):
                    what = f"was claimed before {other}, which was enqueued earlier and precedes it"
                    lines = numbers(before.answer, enqueue.invoked, claim, line)
                    yield Finding("P7", job, what, lines)

    def _hit_by_fault(self, enqueue: Enqueue, until: float) -> bool:
        since = enqueue.invoked.t - self.lease
        faults = self.failing + self.clocks
        return any(begin < until and end + 1.0 > since for begin, end in faults)


def sent_at(line: Line) -> float:
    asked: float = line.get("asked", line.t)
    return asked
