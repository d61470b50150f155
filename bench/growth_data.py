"""Millions of jobs in a queue, put there by one statement inside the database: in the state in which the
queue's own functions would have left them, which `check` proves row by row.

`burn` gives jobs a whole life (due, claimed, ended) in bulk, for the dead entries that this leaves."""

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
# Ids are those of PostgreSQL 18, which is what the benchmarks bring along.
ARRIVED = 10_000  # a second: a backlog has built up over minutes, not in a moment
KEYS = 1000  # the blocked wait behind so many jobs that are not due
LEASE = timedelta(minutes=10)
BURN = 1000

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
# For each key one that is not due and holds it, and the others behind.
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

# A peer's own tables, and the whole life of a job in them, as its worker would write it.
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
        "locked_by = 'burn', locked_at = now() WHERE id = ANY (ARRAY (SELECT id "
        "FROM graphile_worker._private_jobs WHERE is_available ORDER BY priority, run_at LIMIT $1))",
        "end": "DELETE FROM graphile_worker._private_jobs WHERE locked_by = 'burn'",
        "index": "graphile_worker.jobs_main_index",
        "live": "SELECT count(*) FROM graphile_worker._private_jobs WHERE is_available",
    },
}


class Filler:
    """Fills and burns in one database of the server."""

    def __init__(self, postgres: Postgres, database: str) -> None:
        self._postgres = postgres
        self._database = database

    def run(self, sql: str, *parameters: Any) -> None:
        """One statement, without triggers and without waiting for the disk: a state, not a measurement."""

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
        self, job_type: str, first: int, end: int, types: int = 1, rate: int | None = ARRIVED
    ) -> None:
        """Jobs number `first` to `end`, of several types in turn if so many are wanted. They came at so
        many a second, the last of them just now; or, without a rate, all at once."""
        self.run(LANES, job_type, types)
        pause = timedelta(seconds=1 / rate if rate else 0)
        if end > first:
            self.run(PENDING, job_type, first, end, types, PAD, pause)

    def scheduled(self, job_type: str, jobs: int) -> None:
        """Jobs for tomorrow, in the same lane."""
        self.run(SCHEDULED, job_type, jobs, PAD)

    def blocked(self, job_type: str, jobs: int) -> None:
        """Jobs behind others that are not due."""
        self.run(BLOCKED, job_type, jobs, PAD, min(KEYS, max(1, jobs // 10)))

    def finished(self, job_type: str, jobs: int) -> None:
        """History of today."""
        self.run(FINISHED, job_type, jobs, PAD)

    def settle(self) -> None:
        """What autovacuum and the checkpointer would have done meanwhile."""
        self._postgres.query("VACUUM ANALYZE", database=self._database)
        self._postgres.checkpoint()

    # ── the same by the functions ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise unless every kind of row equals one that the functions have made. For an empty queue,
        which it leaves with a few jobs of a type of their own."""
        asyncio.run(self._check())

    async def _check(self) -> None:
        for n, fill in enumerate(
            (self.pending_one, self.scheduled_one, self.blocked_one, self.finished_one)
        ):
            await asyncio.to_thread(fill, f"filled-{n}")
        connection = await asyncpg.connect(self._postgres.url(self._database))
        try:
            await self._make_by_functions(connection)
            made, filled = [await self._rows(connection, kind) for kind in ("made", "filled")]
        finally:
            await connection.close()
        if made != filled or len(made) != 5:
            raise AssertionError(f"the functions leave\n{made}\nand filling leaves\n{filled}")

    def pending_one(self, job_type: str) -> None:
        self.pending(job_type, 0, 1)

    def scheduled_one(self, job_type: str) -> None:
        self.scheduled(job_type, 1)

    def blocked_one(self, job_type: str) -> None:
        self.blocked(job_type, 1)

    def finished_one(self, job_type: str) -> None:
        self.finished(job_type, 1)

    async def _make_by_functions(self, connection: asyncpg.Connection) -> None:
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
        """The rows of one kind, with times and random ids as whether they are there."""
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
    """Jobs in the table of another queue."""
    Filler(postgres, database).run(PEERS[peer]["fill"], first, end, PAD)


def burn(postgres: Postgres, peer: str, database: str, jobs: int, job_type: str) -> None:
    """Let so many jobs be claimed and ended, in bulk: Howdah's by its own functions, those of others by
    what their workers would write."""
    if peer == "howdah":
        asyncio.run(_burn(postgres.url(database), jobs, job_type))
        return
    for at in range(0, jobs, 10_000):
        few = min(10_000, jobs - at)
        postgres.query(PEERS[peer]["claim"], few, database=database)
        postgres.query(PEERS[peer]["end"], database=database)


async def _burn(url: str, jobs: int, job_type: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET synchronous_commit = off")
        left = jobs
        while left > 0:
            rows = await connection.fetch(
                "SELECT id, lease_id FROM howdah.claim_job_batch('burn', $1::text[], $2::int, $3::interval)",
                [job_type], min(BURN, left), LEASE,
            )  # fmt: skip
            if not rows:
                raise AssertionError(f"{left:,} of {jobs:,} jobs to burn are missing")
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
    """A transaction with a snapshot, forgotten by somebody in the same database."""
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
    """Entries of the index that claims walk along which lead to no job: all there are in its pages, less
    those of jobs that wait."""
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
