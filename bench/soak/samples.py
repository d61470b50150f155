"""What a soak reads every few seconds: the server's relations, statements and duties, and the processes in /proc."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from bench.services import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

STATEMENTS = (
    "claim_runs",
    "claim_job_batch",
    "complete_runs",
    "complete_jobs",
    "enqueue_jobs",
    "extend_jobs",
)
# The leaves of a partitioned table count as one relation, as do the indexes of its leaves.
_DAY = r"_?p?(\d{4}_?\d\d_?\d\d|default)"
_RELATIONS = f"""
    SELECT regexp_replace(c.relname, '{_DAY}', ''), c.relkind = 'i',
           sum(CASE c.relkind WHEN 'i' THEN pg_relation_size(c.oid) ELSE pg_table_size(c.oid) END)::bigint,
           coalesce(sum(s.n_dead_tup), 0)::bigint, coalesce(sum(s.n_live_tup), 0)::bigint,
           coalesce(sum(s.n_tup_ins), 0)::bigint
    FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
    WHERE c.relnamespace = 'howdah'::regnamespace AND c.relkind IN ('r', 'i')
    GROUP BY 1, 2
"""
_CATALOG = """
    SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r'
"""
_STATEMENTS = f"""
    SELECT substring(query FROM '({"|".join(STATEMENTS)})\\('), sum(calls)::bigint, sum(total_exec_time), sum(rows)::bigint
    FROM pg_stat_statements
    WHERE toplevel AND query ~ '({"|".join(STATEMENTS)})\\('
    GROUP BY 1
"""
_DUTIES = """
    SELECT duty, last_run_at::text, extract(epoch FROM took)::float8 * 1000
    FROM howdah.maintenance WHERE took IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses."""

    memory: int
    descriptors: int
    threads: int
    log: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. Sizes in bytes, times in ms."""

    t: float
    phase: str
    sizes: dict[str, int] = field(default_factory=dict)
    indexes: frozenset[str] = frozenset()
    dead: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    enqueued: int = 0
    wal: int = 0
    statements: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """Calls, total time and rows since the start, by function."""
    duties: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The time of the last run and its duration, by duty."""
    processes: dict[str, Usage] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    """Seconds of CPU since the start, of the server and of the workers."""


class Sampler:
    """Reads samples on one connection. `processes` maps a name to a process id and its log file; `server` is the
    process id of the postmaster."""

    def __init__(self, url: str, processes: dict[str, tuple[int, Path]], server: int) -> None:
        self._conn = psycopg.connect(url, autocommit=True, application_name="soak sampler")
        self._processes = processes
        self._server = server
        self.began = time.monotonic()

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def read(self, phase: str) -> Sample:
        """One sample."""
        relations = self._rows(_RELATIONS)
        tables = [row for row in relations if not row[1]]
        sizes = {name: size for name, _, size, *_ in relations}
        ((sizes["system catalog"],),) = self._rows(_CATALOG)
        ((wal,),) = self._rows("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")
        return Sample(
            t=time.monotonic() - self.began,
            phase=phase,
            sizes=sizes,
            indexes=frozenset(name for name, is_index, *_ in relations if is_index),
            dead={name: dead for name, _, _, dead, _, _ in tables},
            rows={name: rows for name, _, _, _, rows, _ in tables},
            enqueued=next((added for name, *_, added in tables if name == "live_jobs"), 0),
            wal=wal,
            statements={name: tuple(counted) for name, *counted in self._rows(_STATEMENTS)},
            duties={duty: (at, took) for duty, at, took in self._rows(_DUTIES)},
            processes={name: usage(*each) for name, each in self._processes.items()},
            cpu={
                "server": cpu_seconds(self._server),
                "workers": sum(cpu_seconds(pid) for pid, _ in self._processes.values()),
            },
        )

    def _rows(self, query: str) -> list[Any]:
        return self._conn.execute(query.encode()).fetchall()


def usage(pid: int, log: Path) -> Usage:
    """What a process uses now; zeros if it has exited."""
    home = Path(f"/proc/{pid}")
    try:
        status = dict(_fields((home / "status").read_text().splitlines()))
        descriptors = sum(1 for _ in (home / "fd").iterdir())
    except OSError:
        return Usage(0, 0, 0, log.stat().st_size)
    memory = int(status.get("VmRSS", "0 kB").split()[0]) * 1024
    return Usage(memory, descriptors, int(status.get("Threads", "0")), log.stat().st_size)


def _fields(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name, value.strip()
