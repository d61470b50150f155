"""A primary and a standby with streaming replication, and the day on which the primary's machine dies.

    clients ──▶ gate ──▶ primary ──WAL──▶ standby
                  └────── after `fail_over` ──▶

Clients go through one gate that leads to whoever is the primary, or name both gates in one URL and look
for the server that can write."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import psycopg
from commit_proxy import Gate
from embedded_servers import SETTINGS, cut_power, server_socket

from children import until
from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import Account, find_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STANDBY = "standby"


class Replicas:
    """Both servers. `url` leads to whichever is the primary; `urls` names both."""

    def __init__(self, directory: Path, *, synchronous: bool) -> None:
        self.synchronous = synchronous
        self.primary = EmbeddedServer(directory / "primary", settings=SETTINGS)
        self.standby = EmbeddedServer(directory / STANDBY, settings=SETTINGS)
        self._make()
        self._gate = Gate(server_socket(self.primary))
        self._gates = [Gate(server_socket(each)) for each in (self.primary, self.standby)]
        self._paused: int | None = None

    def _make(self) -> None:
        self.primary.start()
        account = Account.for_new_server()
        programs = find_binaries().reachable_by(account)
        self.standby.directory.mkdir()
        os.chown(self.standby.directory, account.uid, account.gid)
        source = f"host={self.primary.socket_directory} user=howdah application_name={STANDBY}"
        command = [programs.program("pg_basebackup"), f"--dbname={source}", "--write-recovery-conf"]
        command += [f"--pgdata={self.standby.directory / 'cluster'}", "--checkpoint=fast"]
        done = account.run(command)
        assert done.returncode == 0, done.stdout
        if self.synchronous:
            with psycopg.connect(self.primary.url, autocommit=True) as conn:
                conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = {STANDBY}".encode())
                conn.execute("SELECT pg_reload_conf()")
        self.standby.start()
        self.wait_until_streaming()

    @property
    def url(self) -> str:
        """Through the gate that leads to the primary."""
        return self._gate.url("howdah")

    @property
    def urls(self) -> str:
        """Both servers in one URL, of which the one that can write is meant."""
        hosts = ",".join(f"127.0.0.1:{gate.port}" for gate in self._gates)
        return f"postgresql://howdah@{hosts}/howdah?target_session_attrs=read-write"

    def wait_until_streaming(self) -> None:
        """Until the standby follows, synchronously if it should."""
        state = "sync" if self.synchronous else "async"
        until(lambda: self._replication() == [("streaming", state)], f"the standby is {state}")

    def wait_until_caught_up(self) -> None:
        """Until the standby has all that the primary has."""
        with psycopg.connect(self.primary.url, autocommit=True) as conn:
            until(
                lambda: (
                    _row(
                        conn,
                        "SELECT pg_current_wal_flush_lsn() = replay_lsn FROM pg_stat_replication",
                    )
                    == (True,)
                ),
                "the standby has caught up",
            )

    def _replication(self) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.primary.url, autocommit=True) as conn:
            return conn.execute("SELECT state, sync_state FROM pg_stat_replication").fetchall()

    def pause_replication(self) -> None:
        """Stop the process that sends the WAL: from now on the standby learns nothing."""
        with psycopg.connect(self.primary.url, autocommit=True) as conn:
            row = _row(conn, "SELECT pid FROM pg_stat_replication")
        assert row is not None, "nobody replicates"
        self._paused = int(row[0])
        os.kill(self._paused, signal.SIGSTOP)

    def fail_over(self) -> None:
        """The primary's machine dies and the standby takes its place."""
        self.promote()
        self.lead_to_standby()

    def promote(self) -> None:
        """The primary's machine dies and the standby becomes a primary, to which the gate does not yet
        lead."""
        cut_power(self.primary)
        with psycopg.connect(self.standby.url, autocommit=True) as conn:
            conn.execute("SELECT pg_promote(wait => true)")

    def lead_to_standby(self) -> None:
        self._gate.lead_to(server_socket(self.standby))

    def jobs_of(self, server: EmbeddedServer) -> dict[str, tuple[Any, ...]]:
        """The jobs as one of the two has them, by id."""
        with psycopg.connect(server.url, autocommit=True) as conn:
            rows = conn.execute(
                "SELECT id::text, status, lease_id, attempts, claims, seq FROM howdah.jobs"
            ).fetchall()
        return {row[0]: row[1:] for row in rows}

    def what_the_dead_primary_knew(self) -> dict[str, tuple[Any, ...]]:
        """Start the dead machine once more, where no client can reach it, and look."""
        self.primary.start()
        try:
            return self.jobs_of(self.primary)
        finally:
            self.primary.stop("immediate")

    def close(self) -> None:
        for gate in (self._gate, *self._gates):
            gate.close()
        if self._paused is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._paused, signal.SIGCONT)
        self.standby.remove()
        self.primary.remove()


@contextlib.contextmanager
def replicas(directory: Path, *, synchronous: bool) -> Iterator[Replicas]:
    pair = Replicas(directory, synchronous=synchronous)
    try:
        yield pair
    finally:
        pair.close()


def _row(conn: psycopg.Connection[Any], query: str) -> tuple[Any, ...] | None:
    return conn.execute(query.encode()).fetchone()
