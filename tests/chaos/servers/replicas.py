"""A primary and a standby server with streaming replication, and a failover.

    clients ──▶ proxy ──▶ primary ──WAL──▶ standby
                  └─────── after `fail_over` ──▶

Clients either use one proxy that leads to the current primary, or name the proxies of both servers in one URL and
connect to the writable server."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import psycopg
from commit_proxy import CommitProxy
from embedded_servers import SETTINGS, crash, server_socket

from children import until
from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import Account, find_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STANDBY = "standby"


class Replicas:
    """Both servers. `url` leads to the current primary; `urls` names both."""

    def __init__(self, directory: Path, *, synchronous: bool) -> None:
        self.synchronous = synchronous
        self.primary = EmbeddedServer(directory / "primary", settings=SETTINGS)
        self.standby = EmbeddedServer(directory / STANDBY, settings=SETTINGS)
        self._make()
        self._proxy = CommitProxy(server_socket(self.primary))
        self._proxies = [CommitProxy(server_socket(s)) for s in (self.primary, self.standby)]
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
        """The URL of the proxy that leads to the primary."""
        return self._proxy.url("howdah")

    @property
    def urls(self) -> str:
        """Both servers in one URL, which selects the writable one."""
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self._proxies)
        return f"postgresql://howdah@{hosts}/howdah?target_session_attrs=read-write"

    def wait_until_streaming(self) -> None:
        """Wait until the standby replicates, synchronously if requested."""
        state = "sync" if self.synchronous else "async"
        until(lambda: self._replication() == [("streaming", state)], f"the standby is {state}")

    def wait_until_caught_up(self) -> None:
        """Wait until the standby has replayed everything."""
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
        """Stop the process that sends the WAL, so that the standby falls behind."""
        with psycopg.connect(self.primary.url, autocommit=True) as conn:
            row = _row(conn, "SELECT pid FROM pg_stat_replication")
        assert row is not None, "no standby is connected"
        self._paused = int(row[0])
        os.kill(self._paused, signal.SIGSTOP)

    def fail_over(self) -> None:
        """Crash the primary, promote the standby, and redirect the proxy to it."""
        self.promote()
        self.redirect_to_standby()

    def promote(self) -> None:
        """Crash the primary and promote the standby. The proxy still leads to the old primary."""
        crash(self.primary)
        with psycopg.connect(self.standby.url, autocommit=True) as conn:
            conn.execute("SELECT pg_promote(wait => true)")

    def redirect_to_standby(self) -> None:
        self._proxy.redirect(server_socket(self.standby))

    def jobs_of(self, server: EmbeddedServer) -> dict[str, tuple[Any, ...]]:
        """The jobs on one of the two servers, by id."""
        with psycopg.connect(server.url, autocommit=True) as conn:
            rows = conn.execute(
                "SELECT id::text, status, lease_id, attempts, claims, seq FROM howdah.jobs"
            ).fetchall()
        return {row[0]: row[1:] for row in rows}

    def jobs_of_crashed_primary(self) -> dict[str, tuple[Any, ...]]:
        """Start the crashed primary again, where no client reaches it, and read its jobs."""
        self.primary.start()
        try:
            return self.jobs_of(self.primary)
        finally:
            self.primary.stop("immediate")

    def close(self) -> None:
        for proxy in (self._proxy, *self._proxies):
            proxy.close()
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
