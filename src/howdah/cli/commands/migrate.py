"""`howdah migrate`: brings a schema up to date, gives roles their rights, says what is missing, or prints the
SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from howdah import sql
from howdah.cli.options import connect, database_options, json_option, resolve_url, unreachable
from howdah.database import grants, migrate
from howdah.database.connection import (
    Connection,
    ConnectionFailed,
    DatabaseError,
    InsufficientPrivilege,
    LockNotAvailable,
    UndefinedObject,
)
from howdah.encoding import database_url
from howdah.errors import HowdahError, InvalidOption, SchemaTooNew
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from howdah.sql import Migration


@click.command("migrate")
@database_options
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit 1 if it is behind.")
@click.option("--sql", "only_sql", is_flag=True, help="Print the SQL; run it by other means.")
@click.option(
    "--from",
    "after",
    metavar="VERSION",
    help="With --sql: only what is behind this version; `current` asks the database.",
)
@click.option("--to", "target", type=int, metavar="VERSION", help="Go no further than this.")
@click.option(
    "--grants",
    "asked",
    is_flag=False,
    flag_value="",
    metavar="[KIND=ROLE,…]",
    help="Also give roles their rights; kinds are producer, worker, observer and administrator. Without "
    "names: the roles that have some, or four group roles that are made.",
)
@json_option
def migrate_command(
    database: str | None,
    schema: str,
    only_check: bool,
    only_sql: bool,
    after: str | None,
    target: int | None,
    asked: str | None,
    as_json: bool,
) -> None:
    """Create the schema, or bring it up to date.

    Workers of the version before may go on running meanwhile. Nothing is ever migrated back.
    """
    if only_check and only_sql:
        raise click.UsageError("--check and --sql exclude each other.")
    if after is not None and not only_sql:
        raise click.UsageError("--from goes with --sql.")
    if target is not None and (only_check or only_sql):
        raise click.UsageError("--to goes with neither --check nor --sql.")
    if asked is not None and (only_check or target is not None):
        raise click.UsageError("--grants goes with neither --check nor --to.")
    quote_schema(schema)  # complain about the name before anything else
    grants.parse(asked or "")
    if only_sql:
        _print_sql(database, schema, after, as_json, asked)
    elif only_check:
        _check(database, schema, as_json)
    else:
        _migrate(database, schema, target, as_json, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a schema stands."""

    schema: str
    place: str
    version: int

    @property
    def pending(self) -> list[Migration]:
        return [each for each in sql.migrations() if each.version > self.version]

    def sentence(self) -> str:
        name, latest = f'Schema "{self.schema}" of {self.place}', sql.latest_version()
        if self.version == 0:
            return f"{name} does not exist yet; version {latest} is the newest."
        if self.version > latest:
            return f"{name} is at version {self.version}; this Howdah knows {latest}, and works with it."
        if self.version == latest:
            return f"{name} is at version {self.version}, up to date."
        return f"{name} is at version {self.version}; version {latest} is the newest."

    def facts(self) -> dict[str, object]:
        return {
            "schema": self.schema,
            "version": self.version,
            "latest": sql.latest_version(),
            "up_to_date": not self.pending,
            "pending": [_label(each) for each in self.pending],
        }


def _migrate(
    database: str | None, schema: str, target: int | None, as_json: bool, asked: str | None
) -> None:
    if target is not None and not 1 <= target <= sql.latest_version():
        raise InvalidOption(
            f"--to is {target}; this Howdah knows versions 1 to {sql.latest_version()}."
        )
    url = resolve_url(database)
    with connect(url) as conn:
        _read_state(conn, url, schema)  # too new a schema is refused here
        try:
            applied = migrate.migrate(conn, schema, target=target)
            known = None if asked is None else _grant(conn, schema, asked)
        except LockNotAvailable as error:
            raise HowdahError(
                f'schema "{schema}" is in use by transactions that did not end within '
                f"{migrate.PATIENCE:g} s. Nothing of the step was kept; run `howdah migrate` again."
            ) from error
        except DatabaseError as error:
            raise _refusal(url, schema, error) from error
        state = _read_state(conn, url, schema)
    if as_json:
        facts = state.facts() | {"applied": [_label(m) for m in applied]}
        click.echo(json.dumps(facts if known is None else facts | {"roles": known}))
        return
    for each in applied:
        click.echo(f"applied {_label(each)}")
    click.echo(state.sentence())
    for kind, roles in (known or {}).items():
        click.echo(f"{kind:<13}  {', '.join(roles) or '(none)'}")


def _grant(conn: Connection, schema: str, asked: str) -> dict[str, list[str]]:
    try:
        return migrate.drive_patiently(conn, lambda: grants.steps(schema, grants.parse(asked)))
    except UndefinedObject as error:
        raise HowdahError(
            f"{error.diag.message_primary}; nothing was granted. Create it first, as in: CREATE ROLE "
            "name LOGIN."
        ) from error
    except InsufficientPrivilege as error:
        raise HowdahError(
            f'role "{conn.info.user}" may not give rights on schema "{schema}": '
            f"{error.diag.message_primary}; nothing was granted. Let the schema's owner do it, with "
            "CREATEROLE where roles are to be made, or a superuser; or create the roles and name them, as "
            "in --grants producer=app_web,worker=app_worker."
        ) from error


def _check(database: str | None, schema: str, as_json: bool) -> None:
    url = resolve_url(database)
    with connect(url) as conn:
        state = _read_state(conn, url, schema)
    if as_json:
        click.echo(json.dumps(state.facts()))
    else:
        for each in state.pending:
            click.echo(f"missing {_label(each)}")
        click.echo(state.sentence())
        if state.pending:
            click.echo("Run `howdah migrate`.")
    click.get_current_context().exit(1 if state.pending else 0)


def _print_sql(
    database: str | None, schema: str, after: str | None, as_json: bool, asked: str | None
) -> None:
    version = _starting_version(database, schema, after)
    text = migrate.full_script(schema, version)
    if asked is not None:
        text += f"\nBEGIN;\n{grants.script(schema, grants.parse(asked))}COMMIT;\n"
    if as_json:
        return click.echo(json.dumps({"schema": schema, "from": version, "sql": text}))
    if not text:
        return click.echo(f'-- Schema "{schema}" is up to date at version {version}.')
    return click.echo(text, nl=False)


def _starting_version(database: str | None, schema: str, after: str | None) -> int:
    if after is None:
        return 0
    if after == "current":
        url = resolve_url(database)
        with connect(url) as conn:
            return _read_state(conn, url, schema).version
    if not after.isdecimal():
        raise InvalidOption(f'--from is "{after}"; it must be a version number or `current`.')
    return int(after)


def _read_state(conn: Connection, url: str, schema: str) -> State:
    try:
        version, oldest_code = migrate.drive(conn, migrate.current_version(schema))
    except DatabaseError as error:
        raise _refusal(url, schema, error) from error
    if oldest_code > sql.latest_version():
        raise SchemaTooNew(schema, version, sql.latest_version())
    return State(schema=schema, place=database_url.redact(url), version=version)


def _refusal(url: str, schema: str, error: DatabaseError) -> HowdahError:
    if isinstance(error, ConnectionFailed) and (error.sqlstate or "08")[:2] in {"08", "57"}:
        return unreachable(url, error)
    reason = error.diag.message_primary or str(error)
    return HowdahError(
        f'the database refused to migrate schema "{schema}": {reason}. Nothing of that step was '
        "kept. Let a role with the rights run `howdah migrate`, or apply what `howdah migrate --sql` prints."
    )


def _label(migration: Migration) -> str:
    return f"{migration.version:04}_{migration.name}"
