"""Runs every operation on a real database and on the reference, and compares the complete state after each.

Time passes by moving every timestamp back, in open transactions too, so nothing sleeps. `clients` runs the
statements; `comparison` compares the jobs."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clients import OBSERVER, Clients, violation_on_error
from comparison import LEASES, STATE, compare_jobs, compare_leases, same
from reference import (
    HOUR,
    POSTPONED,
    Reference,
    Spec,
    Transaction,
    must,
)

from howdah.model import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from reference import Once


@dataclass(frozen=True, slots=True)
class Claim:
    """A job and the fence under which it was claimed."""

    id: UUID
    lease: UUID


# The leases that a run of the duty searches.
FOUND_BY = {
    "recover": "SELECT l.lease_id FROM leases AS l JOIN maintenance AS m ON m.duty = 'recover' "
    "AND (l.expires_at >= m.reached OR m.state -> 'locked' ? l.lease_id::text)",
    "late": "SELECT l.lease_id FROM leases AS l JOIN maintenance AS m ON m.duty = 'late' "
    "AND l.expires_at >= least(coalesce((m.state ->> 'since')::timestamptz, '-infinity'), "
    "(SELECT min(w.value::timestamptz) FROM jsonb_each_text(m.state -> 'writers') AS w "
    "WHERE w.key <> ALL (writers_of_jobs())))",
}


class System:
    """Three clients of one queue, each of which may have an open transaction."""

    def __init__(self, url: str, patience: str = "2s") -> None:
        self.clients = Clients(url, lock_timeout=patience)
        self.clear()

    def close(self) -> None:
        self.clients.close()

    def clear(self) -> None:
        """Delete everything, for the next walk on the same database."""
        self.clients.clear()
        self.reference = Reference()
        self.claims: list[Claim] = []
        self.ids: list[UUID] = []
        self._results = 0
        self._clock = self.clients.now()

    # ── transactions and time ─────────────────────────────────────────────────────────────────────

    def is_open(self, client: int) -> bool:
        return self.clients.connections[client].autocommit is False

    def begin(self, client: int) -> None:
        self.clients.connections[client].autocommit = False
        self.clients.run(client, "SELECT 1")
        self.reference.open[client] = Transaction()

    def commit(self, client: int) -> None:
        self._read_heads(client)
        with violation_on_error("COMMIT"):
            self.clients.connections[client].commit()
        self.clients.connections[client].autocommit = True
        self.reference.commit(client)
        self._compare(client)

    def rollback(self, client: int) -> None:
        self.clients.connections[client].rollback()
        self.clients.connections[client].autocommit = True
        self._read_heads(OBSERVER)
        undone = self.reference.rollback(client)
        if undone.passed:
            self._move_back(OBSERVER, undone.passed, undone.locks, undone.once, undone.leases)
        self._compare(client)

    def pass_time(self, hours: int) -> None:
        """Let time pass for every row, relative to the clock of the database."""
        by = hours * HOUR
        locked_ids: set[UUID] = set()
        locked_keys: set[Once] = set()
        locked_leases: set[UUID] = set()
        for client, transaction in self.reference.open.items():
            self._move_back(client, by, transaction.locks, transaction.once, transaction.leases)
            locked_ids.update(transaction.locks)
            locked_keys.update(transaction.once)
            locked_leases.update(transaction.leases)
        self._move_back(
            OBSERVER,
            by,
            self.reference.jobs.keys() - locked_ids,
            self.reference.once.keys() - locked_keys,
            self.reference.leases.keys() - locked_leases,
        )
        moved = ", ".join(
            f"{name} = ARRAY (SELECT at - %(by)s FROM unnest({name}) WITH ORDINALITY AS r (at, n) ORDER BY n)"
            for name in ("heads", "raised", "used")
        )
        self.clients.run(OBSERVER, f"UPDATE sweeps SET {moved}", {"by": by})
        # Without `since`, the duty `late` searches from the start: the model does not move its window.
        self.clients.run(
            OBSERVER,
            "UPDATE maintenance SET reached = reached - %s, state = state - 'since'",
            by,
        )
        self.reference.pass_time(by)
        self._compare(OBSERVER, heads=False)

    def _move_back(
        self,
        client: int,
        by: timedelta,
        jobs: Iterable[UUID],
        keys: Iterable[Once],
        leases: Iterable[UUID],
    ) -> None:
        for table, name, ids, columns in (
            ("live_jobs", "id", jobs, ("run_at", "created_at", "claimed_at", "started_at")),
            ("leases", "lease_id", leases, ("claimed_at", "written_at", "expires_at")),
        ):
            moved = ", ".join(f"{column} = {column} - %(by)s" for column in columns)
            self.clients.run(
                client,
                f"UPDATE {table} SET {moved} WHERE {name} = ANY (%(ids)s)",
                {"by": by, "ids": list(ids)},
            )
        self.clients.run(
            client,
            "UPDATE idempotency_keys SET expires_at = expires_at - %s "
            "WHERE job_type || ' ' || key = ANY (%s)",
            by,
            [" ".join(key) for key in keys],
        )

    @contextmanager
    def _operation(self, client: int, *, heads: bool = True) -> Iterator[Reference]:
        """Run an operation in the client's open transaction, or in its own."""
        single = client not in self.reference.open
        if single:
            self.reference.open[client] = Transaction()
        self._read_heads(client)
        yield self.reference
        if single:
            self.reference.commit(client)
        self._compare(client, heads=heads)

    # ── enqueueing ────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, client: int, *specs: Spec) -> list[UUID]:
        """Enqueue jobs. An idempotency key that another open transaction uses is left out, since it would wait."""
        jobs = [
            (new_id(), replace(spec, once=None) if self._would_wait(client, spec) else spec)
            for spec in specs
        ]
        return self._enqueue(client, jobs, again=False)

    def _would_wait(self, client: int, spec: Spec) -> bool:
        """Whether an enqueue would wait for another transaction, which takes the same idempotency key. One that
        only frees the key is not waited for."""
        once = spec.job_type, spec.once or ""
        return any(
            once in transaction.once
            for other, transaction in self.reference.open.items()
            if other != client
        )

    def enqueue_again(self, client: int, job_id: UUID, *, again: bool = True) -> None:
        """Resend an enqueue whose reply was lost, or (not `again`) enqueue an id that exists."""
        self._enqueue(client, [(job_id, self.reference.view(client)[job_id].spec)], again=again)

    def _enqueue(
        self, client: int, jobs: Sequence[tuple[UUID, Spec]], *, again: bool
    ) -> list[UUID]:
        sent = [
            {
                "id": str(job_id),
                "job_type": spec.job_type,
                "priority": spec.priority,
                "delay": spec.delay * 3600.0,
                "ordering_key": spec.key,
                "idempotency_key": spec.once,
                "max_attempts": spec.max_attempts,
            }
            for job_id, spec in jobs
        ]
        with self._operation(client) as reference:
            rows = self.clients.run(
                client,
                "SELECT id, is_new FROM enqueue_jobs(%s::jsonb, %s, '1 hour')",
                json.dumps(sent),
                again,
            )
            answer = [(row["id"], row["is_new"]) for row in rows]
            expected = reference.enqueue(client, jobs, again=again)
            same(answer, expected, "enqueue_jobs answers each job in its place")
        self.ids.extend(job_id for job_id, is_new in answer if is_new and job_id not in self.ids)
        return [job_id for job_id, _ in answer]

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────

    def claim(
        self,
        client: int,
        types: Sequence[str] | None = None,
        batch: int = 10,
        *,
        ignore_heads: bool = False,
        started: bool = False,
        alone: bool = True,
        suspects_first: bool = False,
    ) -> list[Claim]:
        """Claim, as a worker does if suspects are not alone. One claim in sixteen takes suspects first: here the caller
        decides."""
        self.clients.run(client, "SELECT setseed(%s)", self.clients.seeds[suspects_first])
        what = f"worker {client}", None if types is None else list(types), batch
        due_from = "-infinity" if ignore_heads else None
        with self._operation(client) as reference:
            lanes = reference.claimable(client, self._clock, types, ignore_heads=ignore_heads)
            if alone or started:
                rows = self.clients.run(
                    client,
                    "SELECT * FROM claim_job_batch(%s, %s, %s, '1 hour', '{default}', %s, %s, %s)",
                    *what,
                    started,
                    due_from,
                    alone,
                )
            else:
                rows = self.clients.run(
                    client,
                    "SELECT * FROM claim_runs(%s, %s, %s, '1 hour', '{default}', %s)",
                    *what,
                    due_from,
                )
            answer = [row["id"] for row in rows]
            if answer:  # lanes whose first jobs are equally old may be claimed in either order
                turn = {self.reference.view(client)[i].lane: n for n, i in enumerate(answer[::-1])}
                lanes.sort(
                    key=lambda lane: (
                        not (suspects_first and alone and lane[1].suspect),
                        -lane[0][1],
                        lane[1].at(),
                        -turn.get(lane[0], -1),
                    )
                )
            expected = reference.taken(lanes, batch, alone=alone, suspects_first=suspects_first)
            same(answer, expected, "P7: a claim takes the best jobs that are free, best first")
            leases = {row["id"]: row["lease_id"] for row in rows}
            must(
                {*leases.values()}.isdisjoint(claim.lease for claim in self.claims),
                "P3: every claim has a new fence",
            )
            reference.claim(client, leases, started=started, alone=alone)
        claims = [Claim(row["id"], row["lease_id"]) for row in rows]
        self.claims += claims
        return claims

    # ── acknowledging ─────────────────────────────────────────────────────────────────────────────

    def start(self, client: int, claims: Sequence[Claim]) -> list[UUID]:
        with self._operation(client) as reference:
            answer = self.acknowledge(client, "start_jobs(%s, %s)", claims)
            for job_id in self._accepted(client, answer, claims):
                reference.start(client, job_id)
        return answer

    def complete(
        self,
        client: int,
        claims: Sequence[Claim],
        *,
        again: bool = False,
        in_one_step: bool = False,
    ) -> list[UUID]:
        """Complete jobs. `in_one_step`: as a worker does, if no job is given twice and none is locked."""
        with self._operation(client) as reference:
            results = [self._results + n for n in range(len(claims))]
            self._results += len(claims)
            completed_before = {
                claim.id
                for claim in claims
                if again and reference.completed_by(client, claim.id, claim.lease)
            }
            sent = [json.dumps(result) for result in results]
            ids, leases = _pairs(claims)
            is_one_step = (
                in_one_step
                and not again
                and len(ids) == len({*ids})
                and all(self._is_job_free(client, claim) for claim in claims)
            )
            if is_one_step:
                (one,) = self.acknowledge(
                    client, "complete_runs(%s, %s, %s::jsonb[])", claims, sent
                )
                answer = ids if one is None else one
            else:
                answer = self.acknowledge(
                    client, "complete_jobs(%s, %s, %s::jsonb[], NULL, %s)", claims, sent, again
                )
            first: dict[UUID, int] = {}
            for claim, result in zip(claims, results, strict=True):
                if reference.holds(client, claim.id, claim.lease):
                    first.setdefault(claim.id, result)
            accepted = self._accepted(client, answer, claims, also=completed_before)
            reference.complete(client, {job_id: first[job_id] for job_id in accepted})
            if not is_one_step:
                reference.remove_ended(client, leases)
        return answer

    def fail(
        self, client: int, claims: Sequence[Claim], retry_in: timedelta | None = timedelta()
    ) -> list[UUID]:
        with self._operation(client) as reference:
            answer = self.acknowledge(
                client,
                "fail_jobs(%s, %s, %s, NULL, %s::interval[])",
                claims,
                ["broken"] * len(claims),
                [retry_in] * len(claims),
            )
            accepted = self._accepted(client, answer, claims)
            reference.fail(client, dict.fromkeys(accepted, retry_in))
            reference.remove_ended(client, [claim.lease for claim in claims])
        return answer

    def release(
        self, client: int, claims: Sequence[Claim], delay: timedelta = timedelta()
    ) -> list[UUID]:
        with self._operation(client) as reference:
            answer = self.acknowledge(client, "release_jobs(%s, %s, %s)", claims, delay)
            reference.release(client, self._accepted(client, answer, claims), delay)
            reference.remove_ended(client, [claim.lease for claim in claims])
        return answer

    def stop(self, client: int, claims: Sequence[Claim]) -> list[UUID]:
        with self._operation(client) as reference:
            answer = self.acknowledge(client, "stop_jobs(%s, %s)", claims)
            reference.stop(client, self._accepted(client, answer, claims))
            reference.remove_ended(client, [claim.lease for claim in claims])
        return answer

    def extend(
        self,
        client: int,
        claims: Sequence[Claim],
        *,
        started: bool = False,
        more: Sequence[UUID] = (),
        ended: Sequence[UUID] = (),
    ) -> None:
        """Send a heartbeat. `more` are leases whose jobs are not asked about, `ended` those to remove if they have no
        jobs."""
        elapsed = [0.0 if started else None] * len(claims)
        with self._operation(client) as reference:
            rows = self.clients.run(
                client,
                "SELECT * FROM extend_jobs(%s, %s, '1 hour', %s::float8[], %s, %s)",
                *_pairs(claims),
                elapsed,
                list(more),
                list(ended),
            )
            asked = [row for row in rows if row["id"] is not None]
            for claim in self._kept(client, claims, asked, "extended", self._is_lease_free):
                reference.extend(client, claim.lease)
            for row in rows:
                lease = row["lease_id"]
                if row["id"] is None and reference.held(client, lease):
                    free = not reference.is_lease_locked(client, lease)
                    same(
                        (row["extended"], row["mine"]),
                        (free, True),
                        "P3: a heartbeat says which leases are left",
                    )
                if row["id"] is None and row["extended"]:
                    reference.extend(client, lease)
            for claim in claims if started else ():
                is_mine = reference.holds(client, claim.id, claim.lease)
                if is_mine and self._is_job_free(client, claim):
                    reference.start_unless_started(client, claim.id)
            reference.remove_ended(client, ended)

    def progress(self, client: int, claims: Sequence[Claim], percent: int) -> None:
        with self._operation(client) as reference:
            rows = self.clients.run(
                client,
                "SELECT * FROM report_progress(%s, %s, %s::int[])",
                *_pairs(claims),
                [percent] * len(claims),
            )
            for claim in self._kept(client, claims, rows, "reported", self._is_job_free):
                reference.report(client, claim.id, percent)

    def acknowledge(
        self, client: int, call: str, claims: Sequence[Claim], *rest: object
    ) -> list[Any]:
        rows = self.clients.run(client, f"SELECT * FROM {call}", *_pairs(claims), *rest)
        return [next(iter(row.values())) for row in rows]

    def _accepted(
        self,
        client: int,
        answer: Sequence[UUID],
        claims: Sequence[Claim],
        also: Iterable[UUID] = (),
    ) -> list[UUID]:
        """The jobs whose fence is live, which must be those that were returned."""
        holding = [
            claim.id for claim in claims if self.reference.holds(client, claim.id, claim.lease)
        ]
        accepted = list(dict.fromkeys(holding))
        same(
            sorted(set(answer)),
            sorted({*accepted, *also}),
            "P3, P8: an acknowledgement accepts every live fence and no other",
        )
        return accepted

    def _is_job_free(self, client: int, claim: Claim) -> bool:
        return self.reference.lock_of_another(client, claim.id) is None

    def _is_lease_free(self, client: int, claim: Claim) -> bool:
        return not self.reference.is_lease_locked(client, claim.lease)

    def _kept(
        self,
        client: int,
        claims: Sequence[Claim],
        rows: Sequence[dict[str, Any]],
        column: str,
        is_free: Callable[[int, Claim], bool],
    ) -> list[Claim]:
        kept: dict[Claim, None] = {}
        expected = []
        for claim in claims:
            mine = self.reference.holds(client, claim.id, claim.lease)
            free = is_free(client, claim)
            job = self.reference.view(client).get(claim.id)
            asked = mine and job is not None and job.cancel_requested
            expected.append((claim.id, mine and free, mine, asked))
            if mine and free:
                kept[claim] = None
        answer = [(row["id"], row[column], row["mine"], row["cancel_requested"]) for row in rows]
        same(
            sorted(answer), sorted(expected), "P3: a heartbeat says what was kept and what is mine"
        )
        return list(kept)

    # ── operating ─────────────────────────────────────────────────────────────────────────────────

    def recover(self, client: int) -> None:
        with self._operation(client) as reference:
            expired = reference.expired(client)
            (row,) = self.clients.run(client, "SELECT recover_stale_jobs() AS n")
            same(
                row["n"],
                len(reference.stale(client, expired)),
                "recovery finds every expired lease that is not locked",
            )
            self._postpone(client, reference.recover(client, expired))

    def _postpone(self, client: int, leases: Sequence[UUID]) -> None:
        """Recovery postpones leases with locked jobs by a second. Here it is half an hour, so that a walk does not
        depend on how fast it goes: only `pass_time` lets them expire again."""
        if not leases:
            return
        rows = self.clients.run(
            client, "SELECT expires_at FROM leases WHERE lease_id = ANY (%s)", list(leases)
        )
        second, now = timedelta(seconds=1), self.clients.now()
        must(
            len(rows) == len(leases)
            and all(self._clock + second <= row["expires_at"] <= now + second for row in rows),
            "P9: a lease whose job is locked is not tried again a second later",
        )
        self.clients.run(
            client,
            "UPDATE leases SET expires_at = clock_timestamp() + %s WHERE lease_id = ANY (%s)",
            POSTPONED,
            list(leases),
        )

    def cancel(self, client: int, ids: Sequence[UUID]) -> None:
        with self._operation(client) as reference:
            rows = self.clients.run(client, "SELECT id, status FROM cancel_jobs(%s)", list(ids))
            answer = {row["id"]: row["status"] for row in rows}
            same(answer, reference.cancel(client, ids), "cancelling says what it did")

    def retry(self, client: int, ids: Sequence[UUID]) -> None:
        """Retry. A job whose idempotency key another open transaction uses is left out, since it would wait."""
        jobs = self.reference.view(client)
        ids = [i for i in ids if i not in jobs or not self._would_wait(client, jobs[i].spec)]
        with self._operation(client) as reference:
            rows = self.clients.run(
                client, "SELECT retry_jobs AS id FROM retry_jobs(%s)", list(ids)
            )
            answer = {row["id"] for row in rows}
            same(answer, reference.retry(client, ids), "a retry reopens what is finished")

    def take_over(self, client: int, ids: Sequence[UUID]) -> None:
        with self._operation(client) as reference:
            rows = self.clients.run(
                client, "SELECT takeover_jobs AS id FROM takeover_jobs(%s)", list(ids)
            )
            jobs = reference.view(client)
            claimed = {i for i in ids if i in jobs and jobs[i].status == "claimed"}
            same({row["id"] for row in rows}, claimed, "a takeover takes what is claimed")
            reference.release(client, claimed)

    # ── maintenance, always in its own transaction ────────────────────────────────────────────────

    def assign_keys(self) -> None:
        with self._operation(OBSERVER) as reference:
            (row,) = self.clients.run(OBSERVER, "SELECT assign_keys() AS n")
            same(row["n"], reference.assign_keys(OBSERVER), "every unassigned key is checked once")

    def sweep(self) -> None:
        with self._operation(OBSERVER, heads=False) as reference:
            self.clients.run(OBSERVER, "SELECT sweep_lanes()")
            reference.heads = self.clients.heads(OBSERVER)
            self._check_nothing_is_hidden()
            self._lower_heads()

    def run_duty(self, duty: str) -> None:
        """Run one duty once, through the function that workers call."""
        self.clients.run(
            OBSERVER,
            "UPDATE maintenance SET due_at = clock_timestamp() WHERE duty = %s",
            duty,
        )
        with self._operation(OBSERVER, heads=duty != "sweep") as reference:
            expired = reference.expired(OBSERVER)
            # A run leaves to the duty `late` what an earlier run should have recovered.
            if duty in ("recover", "late"):
                rows = self.clients.run(OBSERVER, FOUND_BY[duty])
                within = {row["lease_id"] for row in rows}
                expired = [lease for lease in expired if lease in within]
            rows = self.clients.run(OBSERVER, "SELECT duty, error FROM run_maintenance()")
            self.clients.run(OBSERVER, "UPDATE maintenance SET due_at = 'infinity'")
            same([tuple(row.values()) for row in rows], [(duty, None)], "a duty that is due runs")
            match duty:
                case "recover" | "late":
                    self._postpone(OBSERVER, reference.recover(OBSERVER, expired))
                case "keys":
                    reference.assign_keys(OBSERVER)
                case "sweep":
                    reference.heads = self.clients.heads(OBSERVER)
                    self._check_nothing_is_hidden()
                    self._lower_heads()
                case "prune":
                    touched = {k for t in reference.open.values() for k in t.once}
                    for key in [k for k, v in reference.once.items() if v[1] <= timedelta()]:
                        if key not in touched:
                            del reference.once[key]

    def _check_nothing_is_hidden(self) -> None:
        """After a sweep, claims must find every job that may run."""
        reference = self.reference
        for job in reference.jobs.values():
            if job.status == "pending" and job.blockers == 0:
                must(reference.visible_to_claims(job), f"P1: {job.id} is hidden after a sweep")
        for lane, head in reference.heads.items():
            must(head is None or head <= self.clients.now(), f"the head of {lane} is in the future")

    def _lower_heads(self) -> None:
        """A sweep raises heads to a moment before the clock. Here they stay half an hour behind it, so that a walk does
        not depend on how fast it goes: only `pass_time` puts a job below a head."""
        self.clients.run(
            OBSERVER,
            "UPDATE sweeps SET raised = ARRAY (SELECT CASE WHEN at IS NOT NULL "
            "THEN least(at, clock_timestamp() - interval '30 minutes') END FROM unnest(raised) WITH ORDINALITY AS r (at, n) ORDER BY n)",
        )

    def drain(self) -> None:
        """Commit every transaction and run the remaining jobs: every job must end."""
        for client in list(self.reference.open):
            self.commit(client)
        rounds = 0
        while any(job.live for job in self.reference.jobs.values()):
            rounds += 1
            must(rounds <= 4 * len(self.reference.jobs) + 8, "P1: a job never ends")
            self.assign_keys()
            self.pass_time(2)
            self.sweep()
            self.run_duty("recover")
            self.run_duty("late")
            must(not self.reference.expired(OBSERVER), "P9: an expired lease is never found")
            self.complete(0, self.claim(0))
        self.assign_keys()
        must(not self.reference.unassigned_keys, "P1: a key without jobs is never assigned")

    # ── comparing ─────────────────────────────────────────────────────────────────────────────────

    def _compare(self, client: int, *, heads: bool = True) -> None:
        """Compare what is committed, and what the client sees in its transaction."""
        since = self._clock
        views = [client, OBSERVER] if client in self.reference.open else [OBSERVER]
        seen = {each: self.clients.run(each, STATE) for each in views}
        now = self.clients.now()
        self.reference.extended_lanes = {
            row[0] for row in self.clients.lane_rows(client).keys() - self._rows_before.keys()
        }
        for each, jobs in seen.items():
            compare_jobs(self.reference, each, jobs, since, now)
            compare_leases(self.reference, each, jobs, self.clients.run(each, LEASES))
        self._clock = now
        rows = self.clients.run(OBSERVER, "SELECT ordering_key FROM unassigned_keys")
        same(
            sorted(row["ordering_key"] for row in rows),
            sorted(self.reference.unassigned_keys),
            "the unassigned keys",
        )
        if heads:
            after = self.clients.lane_rows()
            before = {row: self._rows_before.get(row) for row in after}
            same(after, before, "only the sweep moves heads")

    def _read_heads(self, client: int) -> None:
        """Before an operation: the heads that the client sees, and those that are committed."""
        self.reference.heads = self.clients.heads(client)
        self._rows_before = self.clients.lane_rows()


def _pairs(claims: Sequence[Claim]) -> tuple[list[UUID], list[UUID]]:
    return [claim.id for claim in claims], [claim.lease for claim in claims]
