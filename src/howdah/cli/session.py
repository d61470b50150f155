"""A command's way to the database: one connection, which comes back by itself if it breaks, and errors
in words. Creates nothing unless it is told to: a mistyped URL leaves no tables behind."""

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
from howdah.database import connection, migrate
from howdah.database.connection import DatabaseError, InsufficientPrivilege
from howdah.database.driver_errors import is_connection_lost, message_of, translate
from howdah.errors import (
    HowdahError,
    InvalidOption,
    JobNotFound,
    NotPermitted,
    SchemaMissing,
)
from howdah.insight.explain import Insight
from howdah.insight.find import Search
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
    """One connection and the questions to ask on it."""

    def __init__(self, url: str, schema: str, *, create: bool = False) -> None:
        quote_schema(schema)
        self.url = url
        self.schema = schema
        self.statements = WorkerStatements(schema)
        self.insight = Insight(self, schema)
        self.search = Search(self, schema)
        self.conn = connect(url)
        try:
            self._prepare(create=create)
        except BaseException:
            self.conn.close()
            raise

    def _prepare(self, *, create: bool) -> None:
        try:
            with self.in_words():
                if migrate.drive(self.conn, migrate.check(self.schema, create=create)):
                    try:
                        migrate.migrate(self.conn, self.schema)
                    except InsufficientPrivilege:
                        migrate.drive(self.conn, migrate.refuse(self.schema))
        except SchemaMissing as error:
            if create:
                raise
            raise HowdahError(
                f'schema "{self.schema}" has no Howdah tables in this database. Run `howdah migrate` to '
                "make them, or name the right database or schema with --database and --schema."
            ) from error

    def run(self, statement: Statement[T]) -> T:
        """Run one statement and read its answer."""
        if self.conn.closed:
            self.conn = connect(self.url)
        with self.in_words():
            rows = connection.fetch(self.conn, statement.text, statement.parameters)
        return statement.decode(rows)

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        """Turns the driver's errors into sentences."""
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
        hint = " This server is for looking only." if error.sqlstate == "25006" else ""
        raise HowdahError(f"the database refused: {message_of(error)}.{hint}") from error

    def may_write(self) -> bool:
        """Whether this role may ask to be told of changes, which leaves a row."""
        return self.run(
            Statement(
                "may_write",
                "SELECT has_function_privilege($1::text, 'EXECUTE') AND NOT pg_is_in_recovery() "
                "AND current_setting('transaction_read_only') = 'off'",
                (f"{quote_schema(self.schema)}.watch_jobs(text, uuid[], interval)",),
                lambda rows: bool(rows[0][0]),
            )
        )

    def resolve(self, piece: str) -> UUID:
        """The job that an id, or the beginning or end of one, means."""
        try:
            return self.search.resolve(piece)
        except InvalidOption as error:
            raise Misuse(str(error)) from None

    def find(self, piece: str) -> Job:
        """The job itself."""
        job_id = self.resolve(piece)
        job = self.run(self.statements.get(job_id))
        if job is None:
            raise JobNotFound(job_id)
        return job

    def close(self) -> None:
        """Close the connection."""
        self.conn.close()


@contextlib.contextmanager
def open_session(database: str | None, schema: str, *, create: bool = False) -> Iterator[Session]:
    """A session that is closed at the end."""
    try:
        quote_schema(schema)
    except InvalidOption as error:
        raise Misuse(str(error)) from None
    with contextlib.closing(Session(resolve_url(database), schema, create=create)) as session:
        yield session


def queue_command(function: Callable[..., Any]) -> Command:
    """Options for the database and for JSON around a function that takes `(session, output, …)`."""

    @database_options
    @json_lines_option
    @functools.wraps(function)
    def command(database: str | None, schema: str, as_json: bool, **arguments: Any) -> Any:
        with open_session(database, schema) as session:
            return function(session, Output(as_json=as_json), **arguments)

    return command
