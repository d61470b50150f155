"""P1, P4, P5, P6 and P8: no job is lost, its work is done, and no attempt too many or in vain."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import FINAL, Finding, Judge, numbers, successions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import Case
    from howdah.chaos.history import Lease


RETURNED = 10
"""How often an attempt is given back to a job whose worker died before it could say that it had begun."""


class Work(Judge):
    """Jobs, their attempts and their effects."""

    def check(self, cases: Iterable[Case]) -> Iterator[Finding]:
        for case in cases:
            yield from self.lost(case)
            yield from self.attempts(case)
            yield from self.burned(case)
            yield from self.work_done(case)
            yield from self.extra_executions(case)
        yield from self.rolled_back()
        yield from self.enqueued_twice()
        yield from self.exactly_once()

    def lost(self, case: Case) -> Iterator[Finding]:
        """An acknowledged job that is not there, or that nobody will ever end."""
        if case.enqueue is None:
            return
        lines = numbers(case.enqueue.invoked, case.enqueue.answer)
        if not case.rows:
            yield Finding("P1", case.id, "was acknowledged and is gone", lines)
        elif case.rows[0].status not in FINAL:
            what = f"is still {case.rows[0].status} long after the load has ended"
            yield Finding("P1", case.id, what, lines)

    def attempts(self, case: Case) -> Iterator[Finding]:
        """More attempts than allowed, or a job that was started over and over."""
        for row in case.rows:
            if row.attempts > row.max_attempts:
                what = f"has {row.attempts} attempts of {row.max_attempts}"
                yield Finding("P4", case.id, what)
            ran = [lease for lease in case.leases if lease.starts]
            released = sum(line["what"] == "release" for lease in ran for line in lease.accepted)
            if len(ran) - released > row.max_attempts + RETURNED:
                what = f"was started {len(ran)} times with {row.max_attempts} attempts allowed"
                yield Finding("P4", case.id, what, numbers(*(lease.starts[0] for lease in ran)))
        over = [
            lease.claim for lease in case.leases
            if lease.claim is not None and lease.claim["attempt"] > lease.claim["most"]
        ]  # fmt: skip
        if over:
            yield Finding("P4", case.id, "was claimed with no attempt left", numbers(*over))

    def burned(self, case: Case) -> Iterator[Finding]:
        """An attempt used up by a claim under which the job neither began, nor was said to, nor ended. It is
        given back ten times, and no more: one that kills before it is said to begin must come to an end."""
        if not case.rows or not case.leases:
            return
        row = case.rows[0]
        if row.claims - row.attempts >= RETURNED:
            return
        begun = [
            lease for lease in case.leases
            if lease.starts or lease.announced
            or any(line["what"] != "release" for line in lease.accepted)
        ]  # fmt: skip
        if row.attempts > len(begun) and row.status in FINAL:
            what = f"used {row.attempts} attempts and began {len(begun)} times"
            lines = [lease.claim for lease in case.leases if lease not in begun]
            yield Finding("P8", case.id, what, numbers(*lines))

    def work_done(self, case: Case) -> Iterator[Finding]:
        """A completed job whose work was not done under that fence before it was acknowledged."""
        for row in case.rows:
            if row.status != "completed" or not case.leases:
                continue
            mine = next((x for x in case.leases if x.fence == row.lease_id), None)
            if mine is None or mine.claim is None:
                continue
            done = mine.effects
            if not done:
                lines = numbers(mine.claim, *mine.invoked)
                yield Finding("P6", case.id, "was completed and its work was not done", lines)
            elif mine.invoked and min(line.t for line in done) > mine.invoked[0].t:
                lines = numbers(mine.invoked[0], done[0])
                yield Finding("P6", case.id, "was acknowledged before its work was done", lines)

    def extra_executions(self, case: Case) -> Iterator[Finding]:
        """A job that ran again though nothing had happened to its first run."""
        for first, second in successions(case.leases):
            if not first.starts or second.claim is None or self._explained(first, second.claim.t):
                continue
            what = "ran again, and no fault had hit its first run"
            yield Finding("P6", case.id, what, numbers(first.claim, *first.starts, second.claim))

    def rolled_back(self) -> Iterator[Finding]:
        """A job whose enqueue was undone and that is there, or that ran."""
        there = {row.tag: row.id for row in self.database.rows if row.tag is not None}
        for enqueue in self.history.enqueues.values():
            if enqueue.outcome not in ("rolled-back", "refused"):
                continue
            proof = numbers(enqueue.invoked, enqueue.answer)
            for job in enqueue.ids:
                for lease in self.history.jobs.get(job, []):
                    yield Finding(
                        "P5", job, "was rolled back and ran", (*proof, lease.first.number)
                    )
            for described in enqueue.invoked["jobs"]:
                if described["tag"] in there:
                    yield Finding("P5", there[described["tag"]], "was undone and is there", proof)

    def enqueued_twice(self) -> Iterator[Finding]:
        """One enqueue that made two jobs."""
        tags = Counter(row.tag for row in self.database.rows if row.tag is not None)
        for tag, times in tags.items():
            if times > 1:
                jobs = sorted(row.id for row in self.database.rows if row.tag == tag)
                if len(set(jobs)) > 1:
                    yield Finding("P6", jobs[0], f"was enqueued once and is there {times} times")

    def exactly_once(self) -> Iterator[Finding]:
        """Rows written together with the completion: one for each completed job, none for others."""
        for row in self.database.rows:
            if row.job_type == "chaos.once" and row.status in FINAL:
                there, wanted = self.database.effects.get(row.id, 0), row.status == "completed"
                if there != wanted:
                    what = f"is {row.status} and has {there} rows in its handler's table"
                    yield Finding("P6", row.id, what)

    def _explained(self, lease: Lease, until: float) -> bool:
        """Whether a lease was given up, or hit by a fault, before the next claim."""
        if any(line.t < until for line in (*lease.invoked, *lease.accepted)):
            return True
        died = self.history.exits.get(lease.worker)
        if died is not None and died.t < until + 1.0:
            return True
        # Whoever was paused, or could not reach the database, lost its leases a while later; whoever had
        # to wait, if that took long enough to miss the heartbeats.
        since = lease.began - self.lease
        faults = self.failing + self.of_worker[lease.worker]
        faults += [(begin, end) for begin, end in self.delays if end - begin > self.lease / 3]
        if any(begin < until and end > since for begin, end in faults):
            return True
        troubles = self.history.troubles.get(lease.worker, ())
        return any(line["asked"] < until and line.t > since for line in troubles)
