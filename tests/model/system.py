"""Runs every operation on a real database and on the reference, and compares all there is to see.

Time passes by moving every timestamp back, in open transactions too, so nothing here ever sleeps.
Nothing waits either: each connection gives up on a lock after two seconds, and that is a violation."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from reference import (
    HOUR,
    MARGIN,
    REFUNDS,
    Lane,
    Reference,
    Soon,
    Spec,
    Transaction,
    Violation,
    must,
)

from howdah.model import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from uuid import UUID

    from reference import Heads, ModelJob

CLIENTS = 3
WATCHER = CLIENTS  # sees only what is committed
CLEAR = (
    "live_jobs", "finished_jobs", "lanes", "idempotency_keys", "unassigned_keys", "job_events",
)  # fmt: skip
STATE = """
    SELECT id, status, attempts, claims, lease_id, started_at IS NOT NULL AS started,
           holds_key, blockers, cancel_requested, progress, events_count, NULL::jsonb AS result,
           run_at, seq, lease_expires_at <= clock_timestamp() AS expired
    FROM live_jobs
    UNION ALL
    SELECT id, status, attempts, claims, lease_id, false, false, 0, cancel_requested, progress,
           events_count, result, run_at, seq, NULL
    FROM finished_jobs
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job as one claim got it."""

    id: UUID
    lease: UUID


@dataclass(frozen=True, slots=True)
class Peek:
    """A lane as a claim saw it that has not moved the head yet."""

    lane: Lane
    head: datetime | None
    first_seen: datetime

    def later(self, by: timedelta) -> Peek:
        head = None if self.head is None else self.head - by
        return Peek(self.lane, head, self.first_seen - by)


class System:
    """Three clients of one queue, each with a transaction of its own if it likes."""

    def __init__(self, url: str, patience: str = "2s") -> None:
        options = f"-c search_path=howdah -c lock_timeout={patience} -c statement_timeout=20s"
        self.connections = [
            psycopg.connect(url, autocommit=True, options=options, prepare_threshold=1)
            for _ in range(CLIENTS + 1)
        ]
        self._seeds = self._find_seeds()
        self.clear()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def clear(self) -> None:
        """Forgets everything, for the next run on the same database."""
        for connection in self.connections:
            connection.rollback()
            connection.autocommit = True
        for table in CLEAR:
            self._run(WATCHER, f"DELETE FROM {table}")
        self._run(WATCHER, "UPDATE maintenance SET due_at = 'infinity', reached = '-infinity'")
        self.reference = Reference()
        self.claims: list[Claim] = []
        self.ids: list[UUID] = []
        self.peeks: list[Peek] = []
        self._results = 0
        self._clock = self._run(WATCHER, "SELECT clock_timestamp() AS now")[0]["now"]

    # ── transactions and time ─────────────────────────────────────────────────────────────────────

    def is_open(self, client: int) -> bool:
        return self.connections[client].autocommit is False

    def begin(self, client: int) -> None:
        self.connections[client].autocommit = False
        self._run(client, "SELECT 1")
        self.reference.open[client] = Transaction()

    def commit(self, client: int) -> None:
        self._look_at_heads(client)
        with _violating("COMMIT"):
            self.connections[client].commit()
        self.connections[client].autocommit = True
        self.reference.commit(client)
        self._compare(client)

    def rollback(self, client: int) -> None:
        self.connections[client].rollback()
        self.connections[client].autocommit = True
        self._look_at_heads(WATCHER)
        undone = self.reference.rollback(client)
        if undone.passed:
            self._move_back(WATCHER, undone.passed, undone.locks, undone.once)
        self._compare(client)

    def pass_time(self, hours: int) -> None:
        """Time passes for everything, seen from the database's clock."""
        by = hours * HOUR
        busy_ids: set[UUID] = set()
        busy_keys: set[str] = set()
        for client, transaction in self.reference.open.items():
            self._move_back(client, by, transaction.locks, transaction.once)
            busy_ids.update(transaction.locks)
            busy_keys.update(transaction.once)
        jobs, once = self.reference.jobs, self.reference.once
        self._move_back(WATCHER, by, jobs.keys() - busy_ids, once.keys() - busy_keys)
        self._run(WATCHER, "UPDATE lanes SET head_at = head_at - %s", by)
        self._run(WATCHER, "UPDATE maintenance SET reached = reached - %s", by)
        self.reference.pass_time(by)
        self.peeks = [peek.later(by) for peek in self.peeks]
        self._compare(WATCHER, heads=False)

    def _move_back(
        self, client: int, by: timedelta, ids: Iterable[UUID], keys: Iterable[str]
    ) -> None:
        columns = ("run_at", "created_at", "claimed_at", "started_at", "lease_expires_at")
        moved = ", ".join(f"{column} = {column} - %(by)s" for column in columns)
        self._run(
            client,
            f"UPDATE live_jobs SET {moved} WHERE id = ANY (%(ids)s)",
            {"by": by, "ids": list(ids)},
        )
        self._run(
            client,
            "UPDATE idempotency_keys SET expires_at = expires_at - %s WHERE key = ANY (%s)",
            by,
            list(keys),
        )

    @contextmanager
    def _acting(self, client: int, *, heads: bool = True) -> Iterator[Reference]:
        """An operation: in the client's transaction if one is open, else in one of its own."""
        single = client not in self.reference.open
        if single:
            self.reference.open[client] = Transaction()
        self._look_at_heads(client)
        yield self.reference
        if single:
            self.reference.commit(client)
        self._compare(client, heads=heads)

    # ── enqueueing ────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, client: int, *specs: Spec) -> list[UUID]:
        """Enqueues jobs; an idempotency key that another open transaction has is left out."""
        busy = {
            key
            for other, transaction in self.reference.open.items()
            if other != client
            for key in transaction.once
        }
        jobs = [
            (new_id(), replace(spec, once=None) if spec.once in busy else spec) for spec in specs
        ]
        return self._enqueue(client, jobs, again=False)

    def enqueue_again(self, client: int, job_id: UUID) -> None:
        """Repeats an enqueue whose outcome was never heard."""
        self._enqueue(client, [(job_id, self.reference.view(client)[job_id].spec)], again=True)

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
        with self._acting(client) as reference:
            rows = self._run(
                client,
                "SELECT id, is_new FROM enqueue_jobs(%s::jsonb, %s, '1 hour')",
                json.dumps(sent),
                again,
            )
            answer = [(row["id"], row["is_new"]) for row in rows]
            expected = reference.enqueue(client, jobs, again=again)
            _same(answer, expected, "enqueue_jobs answers each job in its place")
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
        moves_head: bool = False,
    ) -> list[Claim]:
        """Claims, and moves the first lane's head exactly if told to."""
        assert not (moves_head and self.is_open(client)), "would lock the lane"
        with self._acting(client, heads=not moves_head) as reference:
            lanes = reference.claimable(client, self._clock, types, ignore_heads=ignore_heads)
            self._run(client, "SELECT setseed(%s)", self._seeds[moves_head])
            rows = self._run(
                client,
                "SELECT * FROM claim_job_batch(%s, %s, %s, '1 hour', '{default}', %s, %s)",
                f"worker {client}",
                None if types is None else list(types),
                batch,
                started,
                ignore_heads,
            )
            answer = [row["id"] for row in rows]
            if answer:  # among lanes whose first jobs are equally old, either may be first
                turn = {self.reference.view(client)[i].lane: n for n, i in enumerate(answer[::-1])}
                lanes.sort(key=lambda lane: (-lane[0][1], lane[1], -turn.get(lane[0], -1)))
            expected = [job.id for _, _, free in lanes for job in free][:batch]
            _same(answer, expected, "P7: a claim takes the best jobs that are free, best first")
            leases = {row["lease_id"] for row in rows}
            must(len(leases) <= 1, "a claim draws one lease")
            must(
                leases.isdisjoint(claim.lease for claim in self.claims),
                "P3: every claim has a fence of its own",
            )
            if answer:
                reference.claim(client, answer, rows[0]["lease_id"], started=started)
            if moves_head:
                latest = (
                    rows[0]["claimed_at"] - MARGIN if rows else datetime.min.replace(tzinfo=UTC)
                )
                self._heads_moved_up({lane: min(seen, latest) for lane, seen, _ in lanes})
                if lanes and lanes[0][2]:
                    lane, seen, _ = lanes[0]
                    heads = [head for row, head in self._lane_rows().items() if row[0] == lane]
                    must(
                        any(head is not None and head >= min(seen, latest) for head in heads),
                        "a claim that draws the lot moves the head up to what it saw",
                    )
        claims = [Claim(row["id"], row["lease_id"]) for row in rows]
        self.claims += claims
        return claims

    def _heads_moved_up(self, margins: Heads) -> None:
        """A claim moves heads to what it saw, or to a margin behind the clock, and never down."""
        for row, head in self._lane_rows().items():
            was, to = self._rows_before[row], margins.get(row[0])
            up = head == to and head is not None and (was is None or was < head)
            must(up or head == was, f"the head of {row} went from {was} to {head}, not to {to}")

    def peek(self, lane: Lane) -> None:
        """Begins a claim: notes what it sees of a lane."""
        self.reference.heads = self._heads(WATCHER)
        for found, first_seen, _ in self.reference.claimable(WATCHER, self._clock):
            if found == lane:
                self.peeks.append(Peek(lane, self.reference.heads[lane], first_seen))

    def move_head(self, n: int = -1) -> None:
        """Ends a claim that peeked a while ago: compare and set."""
        peek = self.peeks[n]
        before = self._lane_rows()
        self._run(
            WATCHER,
            "SELECT move_head('default', %s, %s, coalesce(%s, '-infinity'::timestamptz), %s)",
            *peek.lane,
            peek.head,
            peek.first_seen - MARGIN,
        )
        expected = {
            row: peek.first_seen - MARGIN if (row[0], head) == (peek.lane, peek.head) else head
            for row, head in before.items()
        }
        _same(self._lane_rows(), expected, "a head moves only from where the claim saw it")

    # ── acknowledging ─────────────────────────────────────────────────────────────────────────────

    def start(self, client: int, claims: Sequence[Claim]) -> list[UUID]:
        with self._acting(client) as reference:
            answer = self.acknowledge(client, "start_jobs(%s, %s)", claims)
            for job_id in self._accepted(client, answer, claims):
                reference.start(client, job_id)
        return answer

    def complete(self, client: int, claims: Sequence[Claim], *, again: bool = False) -> list[UUID]:
        with self._acting(client) as reference:
            results = [self._results + n for n in range(len(claims))]
            self._results += len(claims)
            heard = {
                claim.id
                for claim in claims
                if again and reference.completed_by(client, claim.id, claim.lease)
            }
            answer = self.acknowledge(
                client,
                "complete_jobs(%s, %s, %s::jsonb[], NULL, %s)",
                claims,
                [json.dumps(result) for result in results],
                again,
            )
            first: dict[UUID, int] = {}
            for claim, result in zip(claims, results, strict=True):
                if reference.holds(client, claim.id, claim.lease):
                    first.setdefault(claim.id, result)
            accepted = self._accepted(client, answer, claims, also=heard)
            reference.complete(client, {job_id: first[job_id] for job_id in accepted})
        return answer

    def fail(
        self, client: int, claims: Sequence[Claim], retry_in: timedelta | None = timedelta()
    ) -> list[UUID]:
        with self._acting(client) as reference:
            answer = self.acknowledge(
                client,
                "fail_jobs(%s, %s, %s, NULL, %s::interval[])",
                claims,
                ["broken"] * len(claims),
                [retry_in] * len(claims),
            )
            accepted = self._accepted(client, answer, claims)
            reference.fail(client, dict.fromkeys(accepted, retry_in))
        return answer

    def release(
        self, client: int, claims: Sequence[Claim], delay: timedelta = timedelta()
    ) -> list[UUID]:
        with self._acting(client) as reference:
            answer = self.acknowledge(client, "release_jobs(%s, %s, %s)", claims, delay)
            reference.release(client, self._accepted(client, answer, claims), delay)
        return answer

    def stop(self, client: int, claims: Sequence[Claim]) -> list[UUID]:
        with self._acting(client) as reference:
            answer = self.acknowledge(client, "stop_jobs(%s, %s)", claims)
            reference.stop(client, self._accepted(client, answer, claims))
        return answer

    def extend(self, client: int, claims: Sequence[Claim], *, started: bool = False) -> None:
        elapsed = [0.0 if started else None] * len(claims)
        with self._acting(client) as reference:
            rows = self._run(
                client,
                "SELECT * FROM extend_jobs(%s, %s, '1 hour', %s::float8[])",
                *_pairs(claims),
                elapsed,
            )
            for job_id in self._kept(client, claims, rows, "extended"):
                reference.extend(client, job_id, started=started)

    def progress(self, client: int, claims: Sequence[Claim], percent: int) -> None:
        with self._acting(client) as reference:
            rows = self._run(
                client,
                "SELECT * FROM report_progress(%s, %s, %s::int[])",
                *_pairs(claims),
                [percent] * len(claims),
            )
            for job_id in self._kept(client, claims, rows, "reported"):
                reference.report(client, job_id, percent)

    def acknowledge(
        self, client: int, call: str, claims: Sequence[Claim], *rest: object
    ) -> list[UUID]:
        rows = self._run(client, f"SELECT * FROM {call}", *_pairs(claims), *rest)
        return [next(iter(row.values())) for row in rows]

    def _accepted(
        self,
        client: int,
        answer: Sequence[UUID],
        claims: Sequence[Claim],
        also: Iterable[UUID] = (),
    ) -> list[UUID]:
        """The jobs whose fence held, which must be those that were answered."""
        holding = [
            claim.id for claim in claims if self.reference.holds(client, claim.id, claim.lease)
        ]
        accepted = list(dict.fromkeys(holding))
        _same(
            sorted(set(answer)),
            sorted({*accepted, *also}),
            "P3, P8: an acknowledgement accepts every live fence and no other",
        )
        return accepted

    def _kept(
        self, client: int, claims: Sequence[Claim], rows: Sequence[dict[str, Any]], column: str
    ) -> list[UUID]:
        kept: dict[UUID, None] = {}
        expected = []
        for claim in claims:
            mine = self.reference.holds(client, claim.id, claim.lease)
            free = self.reference.lock_of_another(client, claim.id) is None
            job = self.reference.view(client).get(claim.id)
            asked = mine and job is not None and job.cancel_requested
            expected.append((claim.id, mine and free, mine, asked))
            if mine and free:
                kept[claim.id] = None
        answer = [(row["id"], row[column], row["mine"], row["cancel_requested"]) for row in rows]
        _same(
            sorted(answer), sorted(expected), "P3: a heartbeat says what was kept and what is mine"
        )
        return list(kept)

    # ── operating ─────────────────────────────────────────────────────────────────────────────────

    def recover(self, client: int) -> None:
        with self._acting(client) as reference:
            stale = reference.stale(client)
            (row,) = self._run(client, "SELECT recover_stale_jobs() AS n")
            _same(row["n"], len(stale), "recovery finds every expired lease that is not locked")
            reference.recover(client, stale)

    def cancel(self, client: int, ids: Sequence[UUID]) -> None:
        with self._acting(client) as reference:
            rows = self._run(client, "SELECT id, status FROM cancel_jobs(%s)", list(ids))
            answer = {row["id"]: row["status"] for row in rows}
            _same(answer, reference.cancel(client, ids), "cancelling says what it did")

    def retry(self, client: int, ids: Sequence[UUID]) -> None:
        with self._acting(client) as reference:
            rows = self._run(client, "SELECT retry_jobs AS id FROM retry_jobs(%s)", list(ids))
            answer = {row["id"] for row in rows}
            _same(answer, reference.retry(client, ids), "a retry reopens what is finished")

    def take_over(self, client: int, ids: Sequence[UUID]) -> None:
        with self._acting(client) as reference:
            rows = self._run(client, "SELECT takeover_jobs AS id FROM takeover_jobs(%s)", list(ids))
            jobs = reference.view(client)
            claimed = {i for i in ids if i in jobs and jobs[i].status == "claimed"}
            _same({row["id"] for row in rows}, claimed, "a takeover takes what is claimed")
            reference.release(client, claimed)

    # ── maintenance, always in a transaction of its own ───────────────────────────────────────────

    def assign_keys(self) -> None:
        with self._acting(WATCHER) as reference:
            (row,) = self._run(WATCHER, "SELECT assign_keys() AS n")
            _same(row["n"], reference.assign_keys(WATCHER), "every unassigned key is checked once")

    def sweep(self) -> None:
        with self._acting(WATCHER, heads=False) as reference:
            stale = reference.stale(WATCHER)
            self._run(WATCHER, "SELECT sweep_lanes()")
            reference.heads = self._heads(WATCHER)
            self._nothing_is_hidden()
            self._undo_moves_up()
            reference.recover(WATCHER, stale)

    def run_duty(self, duty: str) -> None:
        """One tick of one duty, by the way that workers take."""
        self._run(
            WATCHER,
            "UPDATE maintenance SET due_at = clock_timestamp() WHERE duty = %s",
            duty,
        )
        with self._acting(WATCHER, heads=duty != "sweep") as reference:
            stale = reference.stale(WATCHER)
            if duty == "recover":  # a tick leaves to the sweep what the one before should have had
                rows = self._run(
                    WATCHER,
                    "SELECT j.id FROM live_jobs AS j JOIN maintenance AS m "
                    "ON m.duty = 'recover' AND j.lease_expires_at >= m.reached",
                )
                within = {row["id"] for row in rows}
                stale = [job_id for job_id in stale if job_id in within]
            rows = self._run(WATCHER, "SELECT duty, error FROM run_maintenance()")
            self._run(WATCHER, "UPDATE maintenance SET due_at = 'infinity'")
            _same([tuple(row.values()) for row in rows], [(duty, None)], "a duty that is due runs")
            reference.heads = self._heads(WATCHER)
            match duty:
                case "recover":
                    reference.recover(WATCHER, stale)
                case "keys":
                    reference.assign_keys(WATCHER)
                case "sweep":
                    self._nothing_is_hidden()
                    self._undo_moves_up()
                    reference.recover(WATCHER, stale)
                case "prune":
                    touched = {k for t in reference.open.values() for k in t.once}
                    for key in [k for k, v in reference.once.items() if v[1] <= timedelta()]:
                        if key not in touched:
                            del reference.once[key]

    def _nothing_is_hidden(self) -> None:
        """After a sweep every job that may run is found."""
        reference = self.reference
        for job in reference.jobs.values():
            if job.status == "pending" and job.blockers == 0:
                must(reference.visible_to_claims(job), f"P1: {job.id} is hidden after a sweep")
        for lane, head in reference.heads.items():
            must(head is None or head <= self._now(), f"the head of {lane} is in the future")

    def _undo_moves_up(self) -> None:
        """A sweep moves up what it was slow to walk: by the clock, and no walk may depend on that."""
        for ((job_type, priority), twin), head in self._lane_rows().items():
            was = self._rows_before.get(((job_type, priority), twin))
            if head is not None and (was is None or was < head):
                self._run(
                    WATCHER,
                    "UPDATE lanes SET head_at = coalesce(%s, '-infinity'::timestamptz) "
                    "WHERE job_type = %s AND priority = %s AND twin = %s",
                    was,
                    job_type,
                    priority,
                    twin,
                )

    def drain(self) -> None:
        """Ends every transaction and runs what is left: nothing may be stuck."""
        for client in list(self.reference.open):
            self.commit(client)
        rounds = 0
        while any(job.live for job in self.reference.jobs.values()):
            rounds += 1
            must(rounds <= 4 * len(self.reference.jobs) + 8, "P1: a job never comes to its end")
            self.assign_keys()
            self.pass_time(2)
            self.sweep()
            self.complete(0, self.claim(0))
        self.assign_keys()
        must(not self.reference.unassigned_keys, "P1: a key without jobs is never assigned")

    # ── comparing ─────────────────────────────────────────────────────────────────────────────────

    def _compare(self, client: int, *, heads: bool = True) -> None:
        """Compares what is committed, and what the client sees in its transaction."""
        since = self._clock
        committed = self._run(WATCHER, STATE)
        now = self._now()
        if client in self.reference.open:
            self._compare_jobs(client, self._run(client, STATE), since, self._now())
        self._compare_jobs(WATCHER, committed, since, now)
        self._clock = now
        rows = self._run(WATCHER, "SELECT ordering_key FROM unassigned_keys")
        left, expected = (
            Counter(r["ordering_key"] for r in rows),
            Counter(self.reference.unassigned_keys),
        )
        _same(left, expected, "the unassigned keys")
        if heads:
            after = self._lane_rows()
            before = {row: self._rows_before.get(row) for row in after}
            _same(after, before, "only claims and the sweep move heads")

    def _compare_jobs(
        self, client: int, rows: Sequence[dict[str, Any]], since: datetime, now: datetime
    ) -> None:
        view = self.reference.view(client)
        found = {row["id"]: row for row in rows}
        must(len(found) == len(rows), "P1: a job is live and finished at once")
        _same(found.keys(), view.keys(), "P1, P5: every enqueued job is there, and no other")
        for job_id, job in view.items():
            row = found[job_id]
            self._adopt_due_time(client, job, row["run_at"], since, now)
            actual = {name: row[name] for name in _COMPARED} | {"expired": bool(row["expired"])}
            _same(actual, _expected(job), f"the state of job {job_id}")
        self._keep_promises(found, view)

    def _adopt_due_time(
        self, client: int, job: ModelJob, run_at: datetime, since: datetime, now: datetime
    ) -> None:
        if not job.live:
            return
        if isinstance(job.run_at, Soon):
            due = job.run_at.delay
            must(since + due <= run_at <= now + due, f"P7: {job.id} is due at the wrong time")
            reference = self.reference
            place = reference.jobs
            if client in reference.open and job.id in reference.open[client].wrote:
                place = reference.open[client].wrote
            place[job.id] = replace(job, run_at=run_at)
        else:
            _same(run_at, job.run_at, f"the due time of {job.id}")

    def _keep_promises(self, found: dict[UUID, dict[str, Any]], view: dict[UUID, ModelJob]) -> None:
        """The promises themselves, without asking the reference."""
        holders: Counter[str] = Counter()
        lines: dict[str, list[ModelJob]] = {}
        for job_id, row in found.items():
            spec = view[job_id].spec
            must(row["attempts"] <= spec.max_attempts, f"P4: {job_id} was tried too often")
            must(
                row["claims"] - row["attempts"] <= REFUNDS,
                f"P4: {job_id} got too many attempts back",
            )
            must(
                row["status"] != "claimed" or row["blockers"] == 0,
                f"P7: {job_id} runs though something blocks it",
            )
            if spec.key is not None and view[job_id].live:
                holders[spec.key] += row["holds_key"]
                lines.setdefault(spec.key, []).append(view[job_id])
        for key, count in holders.items():
            must(count <= 1, f"P7: {count} jobs hold the key {key}")
        for line in lines.values():
            by_turn = sorted(line, key=lambda job: job.turn)
            by_seq = sorted(line, key=lambda job: found[job.id]["seq"])
            _same([j.id for j in by_seq], [j.id for j in by_turn], "P7: the line before a key")

    # ── talking to the database ───────────────────────────────────────────────────────────────────

    def _run(self, client: int, text: str, *parameters: object) -> list[dict[str, Any]]:
        single = len(parameters) == 1 and isinstance(parameters[0], dict)
        values: Any = parameters[0] if single else parameters
        with _violating(text), self.connections[client].cursor(row_factory=dict_row) as cursor:
            cursor.execute(sql.SQL(text), values or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def _now(self) -> datetime:
        now: datetime = self._run(WATCHER, "SELECT clock_timestamp() AS now")[0]["now"]
        return now

    def _lane_rows(self, client: int = WATCHER) -> dict[tuple[Lane, bool], datetime | None]:
        """Every row of lanes: a lane may have a twin, from the time when two were adding it."""
        rows = self._run(
            client,
            "SELECT job_type, priority, twin, nullif(head_at, '-infinity') AS head_at FROM lanes",
        )
        return {((row["job_type"], row["priority"]), row["twin"]): row["head_at"] for row in rows}

    def _look_at_heads(self, client: int) -> None:
        """Before an operation: what the client sees, and what is committed."""
        self.reference.heads = self._heads(client)
        self._rows_before = self._lane_rows()

    def _heads(self, client: int) -> Heads:
        """How far down a claim looks in every lane."""
        heads: Heads = {}
        for (lane, _), head in self._lane_rows(client).items():
            other = heads.get(lane, head)
            heads[lane] = None if head is None or other is None else min(head, other)
        return heads

    def _find_seeds(self) -> dict[bool, float]:
        """Seeds of random() with which a claim moves the first lane's head, or none."""
        self._run(
            WATCHER,
            "CREATE FUNCTION pg_temp.draws(seed float8) RETURNS float8[] LANGUAGE plpgsql AS "
            "'BEGIN PERFORM setseed(seed); RETURN ARRAY[random(), random(), random(), random(), "
            "random(), random(), random(), random()]; END'",
        )
        rows = self._run(
            WATCHER,
            "SELECT s / 20000.0::float8 AS seed, pg_temp.draws(s / 20000.0) AS drawn "
            "FROM generate_series(1, 20000) AS s",
        )
        moving = next(row["seed"] for row in rows if row["drawn"][0] < 0.0005)
        still = next(row["seed"] for row in rows if min(row["drawn"]) > 0.05)
        return {True: moving, False: still}


@contextmanager
def _violating(text: str) -> Iterator[None]:
    """No statement here is one that the database may refuse, or that may wait."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise Violation(f"P5: waited for another transaction in {text}") from error
    except psycopg.Error as error:
        raise Violation(f"{error} in {text}") from error


_COMPARED = (
    "status", "attempts", "claims", "lease_id", "started", "holds_key", "blockers",
    "cancel_requested", "progress", "events_count", "result",
)  # fmt: skip


def _expected(job: ModelJob) -> dict[str, Any]:
    return {
        "status": job.status,
        "attempts": job.attempts,
        "claims": job.claims,
        "lease_id": job.lease,
        "started": job.started and job.live,
        "holds_key": job.holds_key,
        "blockers": job.blockers,
        "cancel_requested": job.cancel_requested,
        "progress": job.progress,
        "events_count": job.events,
        "result": job.result,
        "expired": job.expired,
    }


def _pairs(claims: Sequence[Claim]) -> tuple[list[UUID], list[UUID]]:
    return [claim.id for claim in claims], [claim.lease for claim in claims]


def _same(actual: Any, expected: Any, sentence: str) -> None:
    must(actual == expected, f"{sentence}: expected {expected}, the database has {actual}")
