"""What must be in the database when every job of a soak has ended: exact counts, whatever the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.soak.load import BRIEF_SECONDS, FINAL, UNKEPT

if TYPE_CHECKING:
    from collections import Counter

    import psycopg

REMOVAL_SECONDS = 300
"""Expired rows and keys must be gone after this time."""


def wrong_counts(conn: psycopg.Connection[Any], produced: Counter[str]) -> list[str]:
    """What differs from what the producers did, as sentences."""
    return [
        *_jobs(conn, produced),
        *_pairs(produced, ("cancels", "cancelled"), ("results", "awaited"), ("repeated", "keyed")),
        *_nothing(conn, "jobs that have not ended", "SELECT count(*) FROM howdah.live_jobs"),
        *_nothing(
            conn,
            "events of jobs that are gone",
            "SELECT count(*) FROM howdah.job_events AS e "
            "WHERE NOT EXISTS (SELECT FROM howdah.jobs AS j WHERE j.id = e.job_id)",
        ),
        *_nothing(
            conn,
            f"jobs with keep={BRIEF_SECONDS} that ended more than {REMOVAL_SECONDS} s before that",
            "SELECT count(*) FROM howdah.finished_jobs WHERE job_type = 'soak.brief' "
            f"AND completed_at < clock_timestamp() - interval '{BRIEF_SECONDS + REMOVAL_SECONDS} s'",
        ),
        *_nothing(
            conn,
            f"idempotency keys that expired more than {REMOVAL_SECONDS} s ago",
            "SELECT count(*) FROM howdah.idempotency_keys "
            f"WHERE expires_at < clock_timestamp() - interval '{REMOVAL_SECONDS} s'",
        ),
        *_failed_duties(conn),
    ]


def _jobs(conn: psycopg.Connection[Any], produced: Counter[str]) -> list[str]:
    found = {
        (kind.removeprefix("soak."), status): count
        for kind, status, count in conn.execute(
            "SELECT job_type, status, count(*) FROM howdah.finished_jobs GROUP BY 1, 2"
        )
    }
    expected = {
        (kind, FINAL.get(kind, "completed")): count
        for kind, count in produced.items()
        if kind not in (*UNKEPT, *NOT_JOBS, "brief")
    }
    brief = found.pop(("brief", "completed"), 0)
    wrong = [
        f"{found.get(key, 0):,} of the kind {key[0]} {key[1]}, {expected.get(key, 0):,} expected"
        for key in sorted(expected.keys() | found.keys())
        if found.get(key, 0) != expected.get(key, 0)
    ]
    if brief > produced["brief"]:
        wrong.append(f"{brief:,} of the kind brief completed, {produced['brief']:,} enqueued")
    return wrong


NOT_JOBS = ("cancels", "results", "repeated", "wrong results")


def _pairs(produced: Counter[str], *pairs: tuple[str, str]) -> list[str]:
    return [
        f"{produced[done]:,} {done}, {produced[kind]:,} expected"
        for done, kind in pairs
        # The last key of each of two producers may have been used once.
        if produced[kind] - produced[done] not in (range(3) if done == "repeated" else (0,))
    ]


def _nothing(conn: psycopg.Connection[Any], what: str, query: str) -> list[str]:
    ((count,),) = conn.execute(query.encode()).fetchall()
    return [f"{count:,} {what}"] if count else []


def _failed_duties(conn: psycopg.Connection[Any]) -> list[str]:
    rows = conn.execute(
        "SELECT duty, last_error FROM howdah.maintenance WHERE last_error IS NOT NULL"
    ).fetchall()
    return [f"the duty {duty} failed: {error}" for duty, error in rows]
