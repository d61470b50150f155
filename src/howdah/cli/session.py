"""The database session of a command: one connection, which reconnects if it breaks, and errors as
sentences. Creates tables only with `create=True`: a mistyped URL leaves no tables behind."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from howdah.cli.options import (
    connect,
    database_options,
    json_lines_option,
    resolve_url,
    unreachable,
)
from howdah.cli.output import Output
from howdah.cli.values import Misuse
from howdah.database import connection, migrate, sql_steps
from howdah.database.connection import DatabaseError
from howdah.database.driver_errors import is_connection_lost, message_of, translate
from howdah.errors import (
    HowdahError,
    InvalidOption,
    JobNotFound,
    NotPermitted,
    SchemaMissing,
)
from howdah.insight.explain import Explainer
from howdah.insight.find import Search
from howdah.insight.statistics import Statistics
from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement
from howdah.protocol.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from howdah.model import Job

T = TypeVar("T")
Command = Any


class Session:
    """One connection, and what commands read and run on it."""

    def __init__(self, url: str, schema: str, *, create: bool = False) -> None:
        quote_schema(schema)
        self.url = url
        self.schema = schema
        self.statements = WorkerStatements(schema)
        self.statistics = Statistics(self, schema)
        self.explainer = Explainer(self, schema)
        self.search = Search(self, schema)
        self.conn = connect(url)
        try:
            self._prepare(create=create)
        except BaseException:
            self.conn.close()
            raise

    def _prepare(self, *, create: bool) -> None:
        try:
            with self.translated_errors():
                sql_steps.drive(self.conn, migrate.prepare(self.schema, create=create))
        except SchemaMissing as error:
            if create:
                raise
            raise HowdahError(
                f'schema "{self.schema}" has no Howdah tables in this database. Run `howdah migrate` to '
                "make them, or name the right database or schema with --database and --schema."
            ) from error

    def run(self, statement: Statement[T]) -> T:
        """Run one statement and decode its rows."""
        if self.conn.closed:
            self.conn = connect(self.url)
        with self.translated_errors():
            try:
                rows = connection.fetch(self.conn, statement.text, statement.parameters)
            except connection.InsufficientPrivilege:
                if statement.fallback is None:
                    raise
                statement = statement.fallback()
                rows = connection.fetch(self.conn, statement.text, statement.parameters)
        return statement.decode(rows)

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translates the driver's errors into sentences."""
        try:
            yield
        except DatabaseError as error:
            self._fail(error)

    def _fail(self, error: DatabaseError) -> NoReturn:
        if is_connection_lost(error) and error.sqlstate != "25006":
            self.conn.close()
            raise unreachable(self.url, error) from error
        if error.sqlstate == "42501":
            raise NotPermitted(message_of(error), self.conn.info.user) from error
        translated = translate(error, self.schema)
        if translated is not error:
            raise translated from error
        hint = " This server is read-only." if error.sqlstate == "25006" else ""
        raise HowdahError(
            f"the database rejected the statement: {message_of(error)}.{hint}"
        ) from error

    def may_watch(self) -> bool:
        """Whether this role may register a watcher, which writes a row."""
        return self.run(
            Statement(
                "may_write",
                "SELECT has_function_privilege($1::text, 'EXECUTE') AND NOT pg_is_in_recovery() "
                "AND current_setting('transaction_read_only') = 'off'",
                (f"{quote_schema(self.schema)}.watch_jobs(text, uuid[], interval)",),
                lambda rows: bool(rows[0][0]),
            )
        )

    def resolve(self, part: str) -> UUID:
        """The id of the job whose id is, begins with or ends with `part`."""
        try:
            return self.search.resolve(part)
        except InvalidOption as error:
            raise Misuse(str(error)) from None

    def find(self, part: str) -> Job:
        """The job whose id is, begins with or ends with `part`."""
        job_id = self.resolve(part)
        job = self.run(self.statements.get(job_id))
        if job is None:
            raise JobNotFound(job_id)
        return job

    def close(self) -> None:
        """Close the connection."""
        self.conn.close()


@contextlib.contextmanager
def open_session(database: str | None, schema: str, *, create: bool = False) -> Iterator[Session]:
    """A session that is closed at the end of the `with` block."""
    try:
        quote_schema(schema)
    except InvalidOption as error:
        raise Misuse(str(error)) from None
    with contextlib.closing(Session(resolve_url(database), schema, create=create)) as session:
        yield session


def queue_command(function: Callable[..., Any]) -> Command:
    """Add the database and JSON options to a function that takes `(session, output, …)`."""

    @database_options
    @json_lines_option
    @functools.wraps(function)
    def command(database: str | None, schema: str, as_json: bool, **arguments: Any) -> Any:
        with open_session(database, schema) as session:
            return function(session, Output(as_json=as_json), **arguments)

    return command
