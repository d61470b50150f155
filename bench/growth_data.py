"""Fills a queue with millions of jobs by one statement inside the database. The rows are equal to those that the SQL
functions of the queue would have written; `check` proves it column by column.

`churn` claims and completes jobs in bulk, for the dead index entries that this leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.services import Postgres

PAD = "x" * 76
# uuidv7() needs PostgreSQL 18, which is the version of the embedded server.
JOBS_PER_SECOND = 10_000  # arrival rate of a backlog: it has grown over minutes, not in a moment
ORDERING_KEYS = 1000  # of the blocked jobs; each key is held by a job that is not due
LEASE = timedelta(minutes=10)
CHURN_BATCH_JOBS = 1000

PENDING = """
    INSERT INTO howdah.live_jobs (id, job_type, run_at, created_at, data)
    SELECT uuidv7(), $1::text || CASE WHEN $4 > 1 THEN (n % $4)::text ELSE '' END,
           now() - ($3 - n) * $6::interval, now() - ($3 - n) * $6::interval,
           jsonb_build_object('number', n, 'pad', $5::text)
    FROM generate_series($2::bigint, $3::bigint - 1) AS n"""
SCHEDULED = """
    INSERT INTO howdah.live_jobs (id, job_type, run_at, data)
    SELECT uuidv7(), $1::text, clock_timestamp() + interval '1 day',
           jsonb_build_object('number', n, 'pad', $3::text)
    FROM generate_series(0, $2::bigint - 1) AS n"""
# Per key one job that holds it and is not due, and the blocked jobs.
BLOCKED = """
    INSERT INTO howdah.live_jobs (id, job_type, run_at, data, ordering_key, blockers, holds_key)
    SELECT uuidv7(), $1::text,
           clock_timestamp() + CASE WHEN n < $4 THEN interval '1 day' ELSE interval '0' END,
           jsonb_build_object('number', n, 'pad', $3::text), 'key-' || n % $4,
           (n >= $4)::int, n < $4
    FROM generate_series(0, $2::bigint + $4 - 1) AS n"""
FINISHED = """
    INSERT INTO howdah.finished_jobs (
        id, seq, run_at, created_at, claimed_at, started_at, completed_at, drop_on, lease_id, priority,
        attempts, max_attempts, claims, events_count, progress, cancel_requested, status, queue,
        job_type, data, worker_id)
    SELECT uuidv7(), n, now(), now(), now(), now(), now(),
           ((now() + interval '7 days') AT TIME ZONE 'UTC')::date + 1, gen_random_uuid(), 100,
           1, 3, 1, 0, 100, false, 'completed', 'default', $1::text,
           jsonb_build_object('number', n, 'pad', $3::text), 'filler'
    FROM generate_series(0, $2::bigint - 1) AS n"""
LANES = """
    SELECT howdah.add_lane('default', $1::text || CASE WHEN $2 > 1 THEN n::text ELSE '' END, 100)
    FROM generate_series(0, $2::int - 1) AS n"""

# The tables of other peers, and the statements by which their workers claim and complete jobs.
PEERS = {
    "pgqueuer": {
        "fill": "INSERT INTO pgqueuer (priority, entrypoint, payload, status) SELECT 0, 'job', "
        "convert_to(json_build_object('number', n, 'pad', $3::text)::text, 'UTF8'), 'queued' "
        "FROM generate_series($1::bigint, $2::bigint - 1) AS n",
        "claim": "UPDATE pgqueuer SET status = 'picked', updated = now(), heartbeat = now() "
        "WHERE id = ANY (ARRAY (SELECT id FROM pgqueuer WHERE entrypoint = 'job' AND status = 'queued' "
        "ORDER BY priority DESC, id LIMIT $1))",
        "end": "DELETE FROM pgqueuer WHERE status = 'picked'",
        "index": "pgqueuer_ep_prio_id_idx",
        "live": "SELECT count(*) FROM pgqueuer WHERE status = 'queued'",
    },
    "graphile": {
        "fill": "SELECT count(*) FROM (SELECT graphile_worker.add_jobs(array_agg(("
        "'job', json_build_object('number', n, 'pad', $3::text), NULL, NULL, NULL, NULL, NULL, NULL"
        ")::graphile_worker.job_spec)) FROM generate_series($1::bigint, $2::bigint - 1) AS n "
        "GROUP BY n / 5000) AS added",
        "claim": "UPDATE graphile_worker._private_jobs SET attempts = attempts + 1, "
        "locked_by = 'churn', locked_at = now() WHERE id = ANY (ARRAY (SELECT id "
        "FROM graphile_worker._private_jobs WHERE is_available ORDER BY priority, run_at LIMIT $1))",
        "end": "DELETE FROM graphile_worker._private_jobs WHERE locked_by = 'churn'",
        "index": "graphile_worker.jobs_main_index",
        "live": "SELECT count(*) FROM graphile_worker._private_jobs WHERE is_available",
    },
}


class Filler:
    """Fills one database of the server."""

    def __init__(self, postgres: Postgres, database: str) -> None:
        self._postgres = postgres
        self._database = database

    def run(self, sql: str, *parameters: Any) -> None:
        """Run one statement without triggers and without waiting for the disk: this is setup, not measured."""

        async def fill() -> None:
            connection = await asyncpg.connect(self._postgres.url(self._database))
            try:
                await connection.execute("SET session_replication_role = replica")
                await connection.execute("SET synchronous_commit = off")
                await connection.execute(sql, *parameters)
            finally:
                await connection.close()

        asyncio.run(fill())

    def pending(
        self,
        job_type: str,
        first: int,
        end: int,
        types: int = 1,
        rate: int | None = JOBS_PER_SECOND,
    ) -> None:
        """Pending jobs with the numbers `first` to `end`, alternating between `types` job types. They arrived at `rate`
        jobs per second, the last one now; without a rate, all at once."""
        self.run(LANES, job_type, types)
        interval = timedelta(seconds=1 / rate if rate else 0)
        if end > first:
            self.run(PENDING, job_type, first, end, types, PAD, interval)

    def scheduled(self, job_type: str, jobs: int) -> None:
        """Jobs that are due tomorrow, in the same lane."""
        self.run(SCHEDULED, job_type, jobs, PAD)

    def blocked(self, job_type: str, jobs: int) -> None:
        """Jobs that are blocked by key holders that are not due."""
        self.run(BLOCKED, job_type, jobs, PAD, min(ORDERING_KEYS, max(1, jobs // 10)))

    def finished(self, job_type: str, jobs: int) -> None:
        """Jobs completed today."""
        self.run(FINISHED, job_type, jobs, PAD)

    def vacuum(self) -> None:
        """What autovacuum and the checkpointer would have done in the meantime."""
        self._postgres.query("VACUUM ANALYZE", database=self._database)
        self._postgres.checkpoint()

    # ── comparison with the SQL functions ─────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise unless every kind of row equals one written by the SQL functions. Needs an empty queue, and leaves a
        few jobs of separate types in it."""
        asyncio.run(self._check())

    async def _check(self) -> None:
        for n, fill in enumerate(
            (self.pending_one, self.scheduled_one, self.blocked_one, self.finished_one)
        ):
            await asyncio.to_thread(fill, f"filled-{n}")
        connection = await asyncpg.connect(self._postgres.url(self._database))
        try:
            await self._write_by_functions(connection)
            made, filled = [await self._rows(connection, kind) for kind in ("made", "filled")]
        finally:
            await connection.close()
        if made != filled or len(made) != 5:
            raise AssertionError(f"the functions write\n{made}\nand filling writes\n{filled}")

    def pending_one(self, job_type: str) -> None:
        self.pending(job_type, 0, 1)

    def scheduled_one(self, job_type: str) -> None:
        self.scheduled(job_type, 1)

    def blocked_one(self, job_type: str) -> None:
        self.blocked(job_type, 1)

    def finished_one(self, job_type: str) -> None:
        self.finished(job_type, 1)

    async def _write_by_functions(self, connection: asyncpg.Connection) -> None:
        data = {"number": 0, "pad": PAD}
        for job in (
            {"job_type": "made-0"},
            {"job_type": "made-1", "delay": 86400},
            {"job_type": "made-2", "delay": 86400, "ordering_key": "made"},
            {"job_type": "made-2", "ordering_key": "made", "data": data | {"number": 1}},
            {"job_type": "made-3"},
        ):
            await connection.fetch(
                "SELECT * FROM howdah.enqueue_jobs($1::text::jsonb)",
                json.dumps([{"data": data} | job]),
            )
        claimed = await connection.fetch(
            "SELECT id, lease_id FROM howdah.claim_job_batch('filler', '{made-3}')"
        )
        await connection.fetch(
            "SELECT * FROM howdah.complete_jobs($1::uuid[], $2::uuid[], NULL)",
            [row["id"] for row in claimed],
            [row["lease_id"] for row in claimed],
        )

    async def _rows(self, connection: asyncpg.Connection, kind: str) -> list[Any]:
        """The rows of one kind; times and random ids only as whether they are NULL."""
        names = ("id", "seq", "lease_id", "created_at", "claimed_at", "started_at", "completed_at")
        rows = await connection.fetch(
            "SELECT to_jsonb(j) - $1::text[] || jsonb_build_object("
            "'there', (SELECT jsonb_object_agg(k, to_jsonb(j) ->> k IS NOT NULL) FROM unnest($1) AS k), "
            "'job_type', right(job_type, 2), 'has_key', ordering_key IS NOT NULL, "
            "'due', run_at <= clock_timestamp(), 'drop_on', ("
            "SELECT f.drop_on FROM howdah.finished_jobs AS f WHERE f.id = j.id)) AS row "
            "FROM howdah.jobs AS j WHERE job_type LIKE $2 || '%' ORDER BY job_type, seq",
            [*names, "run_at", "ordering_key"],
            kind,
        )
        return [json.loads(row["row"]) for row in rows]


def fill_peer(postgres: Postgres, peer: str, database: str, first: int, end: int) -> None:
    """Insert jobs into the table of another peer."""
    Filler(postgres, database).run(PEERS[peer]["fill"], first, end, PAD)


def churn(postgres: Postgres, peer: str, database: str, jobs: int, job_type: str) -> None:
    """Claim and complete so many jobs in bulk: Howdah's by its SQL functions, those of other peers by the statements
    of their workers."""
    if peer == "howdah":
        asyncio.run(_churn(postgres.url(database), jobs, job_type))
        return
    for at in range(0, jobs, 10_000):
        batch = min(10_000, jobs - at)
        postgres.query(PEERS[peer]["claim"], batch, database=database)
        postgres.query(PEERS[peer]["end"], database=database)


async def _churn(url: str, jobs: int, job_type: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET synchronous_commit = off")
        left = jobs
        while left > 0:
            rows = await connection.fetch(
                "SELECT id, lease_id FROM howdah.claim_job_batch('churn', $1::text[], $2::int, $3::interval)",
                [job_type], min(CHURN_BATCH_JOBS, left), LEASE,
            )  # fmt: skip
            if not rows:
                raise AssertionError(f"{left:,} of {jobs:,} jobs to claim are missing")
            done = await connection.fetch(
                "SELECT * FROM howdah.complete_jobs($1::uuid[], $2::uuid[], NULL)",
                [row["id"] for row in rows],
                [row["lease_id"] for row in rows],
            )
            left -= len(done)
    finally:
        await connection.close()


@contextlib.contextmanager
def held_transaction(postgres: Postgres, database: str) -> Iterator[None]:
    """A transaction with a snapshot that stays open in the same database."""
    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(asyncpg.connect(postgres.url(database)))
    try:
        loop.run_until_complete(connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ"))
        loop.run_until_complete(connection.execute("SELECT count(*) FROM pg_class"))
        yield
    finally:
        loop.run_until_complete(connection.close())
        loop.close()


def dead_entries(postgres: Postgres, peer: str, database: str) -> int:
    """Dead entries of the index that claims scan: all entries in its pages, minus those of pending jobs."""
    howdah = {
        "index": "howdah.live_jobs_pending",
        "live": "SELECT count(*) FROM howdah.live_jobs WHERE status = 'pending' AND blockers = 0",
    }
    queue = howdah if peer == "howdah" else PEERS[peer]
    postgres.query("CREATE EXTENSION IF NOT EXISTS pgstattuple", database=database)
    entries = postgres.value(
        "SELECT tuple_count + dead_tuple_count FROM pgstattuple($1::text::regclass)",
        queue["index"],
        database=database,
    )
    return int(entries) - int(postgres.value(queue["live"], database=database))
