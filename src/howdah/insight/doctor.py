"""`howdah doctor`: finds what makes a queue slow, stuck or unsafe, and says what to do about it. The checks
are independent: one that fails, for example for lack of a privilege, is reported as unknown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from howdah import sql
from howdah.database import connection
from howdah.database.connection import Connection, DatabaseError, InvalidSchemaName, UndefinedTable
from howdah.errors import counted, did_you_mean
from howdah.insight.durations import format_duration
from howdah.insight.statistics import ALIVE
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Level = Literal["ok", "warning", "problem", "unknown"]

OLD_TRANSACTION = timedelta(minutes=5)
SKEW = timedelta(seconds=2)
OVERDUE = timedelta(minutes=1)
# A heartbeat far ahead was written by a clock that was ahead, and says nothing.
_IS_ALIVE = "seen_at BETWEEN clock_timestamp() - $1::interval AND clock_timestamp() + $1::interval"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `advice` says what to do, and is empty if nothing is wrong."""

    check: str
    level: Level
    text: str
    advice: str = ""


class Doctor:
    """The checks, on one connection in autocommit mode."""

    def __init__(self, conn: Connection, schema: str) -> None:
        self._conn = conn
        self._schema = schema
        self._s = quote_schema(schema)

    def examine(self) -> Iterator[Finding]:
        """Run every check, one after the other."""
        checks: list[tuple[str, Callable[[], Finding]]] = [
            ("server", self._server),
            ("schema", self._schema_version),
            ("encoding", self._encoding),
            ("access", self._access),
            ("durability", self._durability),
            ("notifications", self._notifications),
            ("clock", self._clock),
            ("transactions", self._transactions),
            ("slots", self._slots),
            ("dead entries", self._dead_entries),
            ("workers", self._workers),
            ("job types", self._job_types),
            ("lanes", self._lanes),
            ("leases", self._leases),
            ("maintenance", self._maintenance),
            ("retention", self._retention),
            ("connections", self._connections),
        ]
        for name, check in checks:
            try:
                yield check()
            except (UndefinedTable, InvalidSchemaName):
                yield Finding(name, "problem", f'"{self._schema}" has no Howdah tables',
                              "Run `howdah migrate`, or name the schema with --schema.")  # fmt: skip
                return
            except DatabaseError as error:
                reason = (error.diag.message_primary or str(error)).strip()
                yield Finding(name, "unknown", f"the check failed: {reason}")
                if name == "schema" or self._conn.broken:
                    return

    def _rows(self, text: str, *parameters: Any) -> list[Any]:
        return list(connection.fetch(self._conn, text.replace("{s}", self._s), parameters))

    def _server(self) -> Finding:
        version = self._conn.info.server_version
        name = f"PostgreSQL {version // 10000}.{version % 10000}"
        if version < 140000:
            return Finding("server", "problem", name, "Howdah needs PostgreSQL 14 or newer.")
        is_standby = self._rows("SELECT pg_is_in_recovery()")[0][0]
        if is_standby:
            return Finding("server", "problem", f"{name}, a read-only standby",
                           "Point the URL at the primary.")  # fmt: skip
        if self._rows("SELECT current_setting('transaction_read_only')")[0][0] == "on":
            return Finding("server", "problem", f"{name}, read-only: default_transaction_read_only is on",
                           "Turn it off for this database and role, or point the URL at the primary.")  # fmt: skip
        isolation = self._rows("SELECT current_setting('default_transaction_isolation')")[0][0]
        if isolation not in ("read committed", "read uncommitted"):  # which are the same
            return Finding("server", "warning", f"{name}, default_transaction_isolation is {isolation}",
                           "Howdah's own connections use READ COMMITTED. Clients in SQL must, too: ALTER ROLE … "
                           "SET default_transaction_isolation = 'read committed'.")  # fmt: skip
        return Finding("server", "ok", name)

    def _schema_version(self) -> Finding:
        (found,) = self._rows("SELECT max(version) FROM {s}.migrations")[0]
        latest = sql.latest_version()
        if found == latest:
            return Finding("schema", "ok", f'"{self._schema}" at version {found}')
        text = f'"{self._schema}" is at version {found}, this howdah package needs version {latest}'
        advice = (
            "Run `howdah migrate`."
            if found < latest
            else "Upgrade the howdah package on this machine."
        )
        return Finding("schema", "warning", text, advice)

    def _encoding(self) -> Finding:
        (encoding,) = self._rows("SELECT current_setting('server_encoding')")[0]
        if encoding != "UTF8":
            return Finding("encoding", "warning", f"the database has the encoding {encoding}",
                           "Jobs with other characters are refused, and SQL_ASCII checks none. Use a database "
                           "that was created with ENCODING 'UTF8'.")  # fmt: skip
        return Finding("encoding", "ok", encoding)

    def _access(self) -> Finding:
        owner, is_superuser, creators, users = self._rows(
            "SELECT o.rolname, o.rolsuper, "
            "count(*) FILTER (WHERE a.privilege_type = 'CREATE'), "
            "count(*) FILTER (WHERE a.privilege_type = 'USAGE') "
            "FROM pg_namespace AS n JOIN pg_roles AS o ON o.oid = n.nspowner "
            "LEFT JOIN LATERAL aclexplode(n.nspacl) AS a ON a.grantee <> n.nspowner "
            "WHERE n.nspname = $1::text GROUP BY o.rolname, o.rolsuper",
            self._schema,
        )[0]
        text = f'owned by "{owner}", used by {counted(users, "other role")}'
        if creators:
            return Finding("access", "problem", f"{text}, and {counted(creators, 'role')} may create objects in it",
                           "Such a role could make the schema's functions run its own code with their "
                           f"owner's privileges: REVOKE CREATE ON SCHEMA {self._s}.")  # fmt: skip
        if is_superuser and users:
            return Finding("access", "warning", f"{text}; the owner is a superuser",
                           "The schema's functions run with their owner's privileges: `howdah migrate "
                           "--grants` gives them to a role that owns nothing else.")  # fmt: skip
        return Finding("access", "ok", text)

    def _durability(self) -> Finding:
        settings = dict(
            self._rows(
                "SELECT name, setting FROM pg_settings "
                "WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes')"
            )
        )
        off = [name for name, value in settings.items() if value == "off"]
        if "fsync" in off or "full_page_writes" in off:
            return Finding("durability", "problem", f"{', '.join(off)} is off",
                           "A server crash may lose or corrupt jobs; turn it on.")  # fmt: skip
        if off:
            return Finding("durability", "warning", "synchronous_commit is off",
                           "A server crash may lose the most recent enqueues.")  # fmt: skip
        return Finding("durability", "ok", "commits are durable")

    def _notifications(self) -> Finding:
        advice = (
            "Workers poll every second instead. For immediate pick-up, give them a direct connection or "
            "session pooling."
        )
        pooled = self._rows("SELECT pg_backend_pid()")[0][0] != self._conn.info.backend_pid
        if pooled and connection.shares_session(self._conn):
            # LISTEN here would stay in a session that other clients use.
            return Finding(
                "notifications",
                "warning",
                "none through this pooler: it is in transaction mode, and clients share its sessions",
                advice,
            )
        channel = f"howdah:doctor:{uuid4().hex[:12]}"
        self._conn.execute(f'LISTEN "{channel}"'.encode())
        self._rows("SELECT pg_notify($1::text, '')", channel)
        received = any(True for _ in self._conn.notifies(timeout=2, stop_after=1))
        self._conn.execute(f'UNLISTEN "{channel}"'.encode())
        if received:
            where = "through the pooler, in session mode" if pooled else "on this connection"
            return Finding("notifications", "ok", f"LISTEN works {where}")
        through = " through the pooler" if pooled else ""
        return Finding("notifications", "warning", f"LISTEN does not work{through}", advice)

    def _clock(self) -> Finding:
        before = datetime.now(UTC)
        (there,) = self._rows("SELECT clock_timestamp()")[0]
        middle = before + (datetime.now(UTC) - before) / 2
        skew = there - middle
        text = f"this machine and the database differ by {abs(skew.total_seconds()):.2f} s"
        if abs(skew) > SKEW:
            return Finding("clock", "warning", text,
                           "The database's clock decides when jobs run; a run_at computed on this machine "
                           "is wrong by that much. Use delay=, or synchronize the clocks.")  # fmt: skip
        return Finding("clock", "ok", text)

    def _transactions(self) -> Finding:
        rows = self._rows(
            "SELECT pid, usename, application_name, state, clock_timestamp() - xact_start "
            "FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend' ORDER BY xact_start LIMIT 1"
        )
        if not rows or rows[0][4] < OLD_TRANSACTION:
            if not self._rows("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")[0][0]:
                return Finding("transactions", "unknown", "this role sees only its own transactions",
                               "To check all: GRANT pg_read_all_stats.")  # fmt: skip
            oldest = (
                f"the oldest is {format_duration(rows[0][4])} old"
                if rows
                else "no other transaction is open"
            )
            return Finding("transactions", "ok", oldest)
        pid, user, application, state, age = rows[0]
        session = f"pid {pid}, user {user}" + (f", {application}" if application else "")
        return Finding("transactions", "warning", f"one has been open for {format_duration(age)} ({session}, {state})",
                       f"Vacuum cannot remove rows that it may still see. To end it: SELECT "
                       f"pg_terminate_backend({pid}).")  # fmt: skip

    def _slots(self) -> Finding:
        rows = self._rows(
            "SELECT slot_name, age(coalesce(xmin, catalog_xmin)) FROM pg_replication_slots "
            "WHERE coalesce(xmin, catalog_xmin) IS NOT NULL AND NOT active "
            "UNION ALL SELECT 'prepared transaction ' || gid, age(transaction) FROM pg_prepared_xacts"
        )
        if not rows:
            return Finding("slots", "ok", "no inactive replication slot, no prepared transaction")
        names = ", ".join(str(row[0]) for row in rows[:3])
        return Finding("slots", "warning", f"vacuum is held back by {names}",
                       "If it is not needed, drop the slot or end the prepared transaction.")  # fmt: skip

    def _dead_entries(self) -> Finding:
        rows = self._rows(
            "SELECT n_live_tup, n_dead_tup, last_autovacuum FROM pg_stat_user_tables "
            "WHERE schemaname = $1::text AND relname = 'live_jobs'",
            self._schema,
        )
        live, dead, _ = rows[0]
        text = f"live_jobs has {dead:,} dead and {live:,} live rows"
        if dead > 100_000 and dead > 2 * live:
            return Finding("dead entries", "warning", text,
                           "Check that autovacuum is on and that no old transaction is open (see above).")  # fmt: skip
        return Finding("dead entries", "ok", text)

    def _workers(self) -> Finding:
        (alive, lost) = self._rows(
            f"SELECT count(*) FILTER (WHERE {_IS_ALIVE}), count(*) FILTER (WHERE NOT {_IS_ALIVE}) "
            "FROM {s}.workers",
            ALIVE,
        )[0]
        text = f"{alive} alive" + (f", {lost} lost" if lost else "")
        if not alive:
            return Finding(
                "workers", "warning", "no worker is alive", "Start one: `howdah worker MODULE:APP`."
            )
        return Finding("workers", "ok", text)

    def _job_types(self) -> Finding:
        known = {
            name
            for (names,) in self._rows(
                f"SELECT job_types FROM {{s}}.workers WHERE {_IS_ALIVE}",
                ALIVE,
            )
            for name in names
        }
        waiting = [
            row[0]
            for row in self._rows(
                "SELECT DISTINCT l.job_type FROM {s}.lanes AS l WHERE EXISTS (SELECT FROM {s}.live_jobs j "
                "WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue = l.queue "
                "AND j.job_type = l.job_type AND j.priority = l.priority)"
            )
        ]
        if not known:
            return Finding(
                "job types",
                "ok",
                f"{counted(len(waiting), 'type')} with waiting jobs; no live worker to compare with",
            )
        unknown = [name for name in waiting if name not in known]
        if not unknown:
            return Finding("job types", "ok", "a live worker runs every type with waiting jobs")
        named = ", ".join(f'"{name}"{did_you_mean(name, known)}' for name in unknown[:5])
        return Finding("job types", "problem", f"no live worker runs {named}",
                       "Deploy a worker that has the task, or cancel the jobs.")  # fmt: skip

    def _lanes(self) -> Finding:
        (count,) = self._rows("SELECT count(*) FROM {s}.lanes")[0]
        if count > 5000:
            return Finding("lanes", "warning", f"{count:,} lanes",
                           "Each (queue, job type, priority) is one lane, and a claim reads all lanes of its "
                           "worker. Put variable parts into the data, not into the job type.")  # fmt: skip
        return Finding("lanes", "ok", f"{count:,} lanes")

    def _leases(self) -> Finding:
        (expired,) = self._rows(
            # The lease of a worker stays for a while after its jobs have ended.
            "SELECT count(*) FROM (SELECT unnest(l.job_ids) AS id, l.lease_id FROM {s}.leases AS l "
            "WHERE l.expires_at < clock_timestamp() - interval '10 seconds') AS e "
            "JOIN {s}.live_jobs AS j ON j.id = e.id AND j.lease_id = e.lease_id"
        )[0]
        if expired:
            return Finding("leases", "problem", f"{counted(expired, 'job')} with a lease that expired over 10 s ago",
                           "Maintenance does not run: start a worker, or run `howdah recover`.")  # fmt: skip
        return Finding("leases", "ok", "no job has a lease that expired over 10 s ago")

    def _maintenance(self) -> Finding:
        rows = self._rows(
            "SELECT duty, clock_timestamp() - due_at, last_error FROM {s}.maintenance "
            "WHERE due_at < clock_timestamp() - $1::interval OR last_error IS NOT NULL ORDER BY rank",
            OVERDUE,
        )
        if not rows:
            return Finding("maintenance", "ok", "every duty runs in time")
        failing = [f"{duty}: {error}" for duty, _, error in rows if error]
        if failing:
            return Finding("maintenance", "problem", "; ".join(failing),
                           "The duty is retried automatically; the message says why it fails.")  # fmt: skip
        late = ", ".join(f"{duty} ({format_duration(age)} late)" for duty, age, _ in rows)
        return Finding("maintenance", "warning", late,
                       f"Keep a worker running, or run SELECT {self._s}.run_maintenance() from cron.")  # fmt: skip

    def _retention(self) -> Finding:
        (days,) = self._rows(
            "SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = ($1::text)::regclass AND c.relname ~ '^finished_jobs_[0-9]{8}$' "
            "AND right(c.relname, 8) > to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD')",
            f"{self._s}.finished_jobs",
        )[0]
        (stray,) = self._rows("SELECT count(*) FROM {s}.finished_jobs_default")[0]
        text = f"partitions exist for the next {counted(days, 'day')}" + (
            f", {counted(stray, 'row')} in the default partition" if stray else ""
        )
        if days < 8:
            return Finding("retention", "warning", text,
                           "Maintenance has not run for a long time: see above.")  # fmt: skip
        return Finding("retention", "ok", text)

    def _connections(self) -> Finding:
        # A limit of -1 means none.
        rows = self._rows(
            "WITH clients AS (SELECT datname, usename FROM pg_stat_activity "
            "WHERE backend_type = 'client backend') "
            "SELECT 'max_connections', (SELECT count(*) FROM clients), "
            "current_setting('max_connections')::int "
            "UNION ALL SELECT 'the CONNECTION LIMIT of this database', "
            "(SELECT count(*) FROM clients WHERE datname = current_database()), datconnlimit "
            "FROM pg_database WHERE datname = current_database() "
            "UNION ALL SELECT 'the CONNECTION LIMIT of this role', "
            "(SELECT count(*) FROM clients WHERE usename = session_user), rolconnlimit "
            "FROM pg_roles WHERE rolname = session_user"
        )
        used, limit = rows[0][1:]
        for name, taken, most in rows:
            if most >= 0 and taken > 0.8 * most:
                return Finding("connections", "warning", f"{taken} of {most} in use ({name})",
                               f"Raise {name}, or use a connection pooler.")  # fmt: skip
        return Finding("connections", "ok", f"{used} of {limit} in use")
