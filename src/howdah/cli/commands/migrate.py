"""`howdah migrate`: brings a schema up to date, grants privileges to roles, reports what is missing or altered, or
prints the SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from howdah import sql
from howdah.cli.options import connect, database_options, json_option, resolve_url, unreachable
from howdah.database import grants, migrate, sql_steps
from howdah.database.connection import (
    Connection,
    ConnectionFailed,
    DatabaseError,
    InsufficientPrivilege,
    LockNotAvailable,
    UndefinedObject,
)
from howdah.encoding import database_url
from howdah.encoding.visible_text import clean
from howdah.errors import HowdahError, InvalidOption
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.sql import TableStep
    from howdah.sql.catalog import Difference


@click.command("migrate")
@database_options
@click.option(
    "--check",
    "only_check",
    is_flag=True,
    help="Change nothing; exit 1 if something is missing or altered.",
)
@click.option("--sql", "only_sql", is_flag=True, help="Print the SQL, to run it by other means.")
@click.option(
    "--from",
    "after",
    metavar="VERSION",
    help="With --sql: only what comes after this version; `current` reads it from the database.",
)
@click.option(
    "--to",
    "target",
    type=int,
    metavar="VERSION",
    help="The version to migrate to; only the newest can be made.",
)
@click.option(
    "--grants",
    "asked",
    is_flag=False,
    flag_value="",
    metavar="[KIND=ROLE,…]",
    help="Also grant privileges to roles; kinds are producer, worker, observer and administrator. Without "
    "names: to the roles that have some, or to four group roles that are created.",
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

    Workers of the previous version can keep running. There are no backward migrations.
    """
    if only_check and only_sql:
        raise click.UsageError("--check and --sql exclude each other.")
    if after is not None and not only_sql:
        raise click.UsageError("--from goes with --sql.")
    if target is not None and (only_check or only_sql):
        raise click.UsageError("--to goes with neither --check nor --sql.")
    if asked is not None and (only_check or target is not None):
        raise click.UsageError("--grants goes with neither --check nor --to.")
    quote_schema(schema)  # an invalid name is reported first
    grants.parse(asked or "")
    if only_sql:
        _print_sql(database, schema, after, as_json, asked)
    elif only_check:
        _check(database, schema, as_json)
    else:
        _migrate(database, schema, target, as_json, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The version of a schema, and how it differs from what its last migration left."""

    schema: str
    place: str
    installed: migrate.Installed
    functions_needed: bool
    differences: list[Difference]

    @property
    def version(self) -> int:
        return self.installed.version

    @property
    def pending(self) -> list[TableStep]:
        return sql.release().pending(self.version)

    @property
    def is_current(self) -> bool:
        return self.installed.is_current(sql.release())

    @property
    def is_whole(self) -> bool:
        """Whether `--check` finds nothing to report."""
        return self.is_current and not self.differences

    def sentence(self) -> str:
        name, latest = f'Schema "{self.schema}" of {self.place}', sql.latest_version()
        if self.version == 0:
            return f"{name} does not exist yet; version {latest} is the newest."
        if self.version > latest:
            return f"{name} is at version {self.version}; this Howdah knows {latest}, and works with it."
        if self.version < latest:
            return f"{name} is at version {self.version}; version {latest} is the newest."
        if not self.is_current:
            return f"{name} is at version {self.version}, with the functions of another build."
        if self.differences:
            return f"{name} is at version {self.version}, and was altered since."
        return f"{name} is at version {self.version}, up to date."

    def advice(self) -> list[str]:
        """How to repair it."""
        lines = []
        functions = [each for each in self.differences if each.kind == "function"]
        others = [each for each in self.differences if each.kind != "function"]
        # A view first: functions and triggers need it.
        repaired = sorted(others, key=lambda each: each.kind != "view")
        statements = [f"{text};" for each in repaired for text in each.repair()]
        if statements:
            lines += [
                "`howdah migrate` repairs functions only. Run this for the rest:",
                f"SET search_path = {quote_schema(self.schema)};",
                *statements,
            ]
        if not self.is_current or any(each.problem != "unexpected" for each in functions):
            lines.append("Run `howdah migrate`.")
        if added := _names(each for each in self.differences if each.problem == "unexpected"):
            lines.append(f"Remove or move what was added: {added}.")
        if lost := _names(
            each for each in others if each.problem != "unexpected" and not each.repair()
        ):
            lines.append(f"Repair by hand or from a backup, as data may be lost: {lost}.")
        return lines

    def facts(self) -> dict[str, object]:
        return {
            "schema": self.schema,
            "version": self.version,
            "latest": sql.latest_version(),
            "up_to_date": self.is_whole,
            "pending": [each.label for each in self.pending],
            "differences": [each.facts() for each in self.differences],
        }


def _names(differences: Iterable[Difference]) -> str:
    return ", ".join(f"{each.kind} {each.name}" for each in differences)


def _migrate(
    database: str | None, schema: str, target: int | None, as_json: bool, asked: str | None
) -> None:
    latest = sql.latest_version()
    if target is not None and not 1 <= target <= latest:
        raise InvalidOption(f"--to is {target}; this Howdah knows versions 1 to {latest}.")
    url = resolve_url(database)
    with connect(url) as conn:
        state = _read_state(conn, url, schema)  # a schema that is too new is refused here
        applied, known = migrate.Applied(), None
        if target is not None and target < latest:
            _refuse_older(state, target)
        else:
            try:
                applied = migrate.migrate(conn, schema)
                known = None if asked is None else _grant(conn, schema, asked)
            except LockNotAvailable as error:
                raise HowdahError(
                    f'schema "{schema}" is in use by transactions that did not end within '
                    f"{sql_steps.RETRY_SECONDS:g} s. Nothing was changed; run `howdah migrate` again."
                ) from error
            except DatabaseError as error:
                raise _refusal(url, schema, error) from error
            state = _read_state(conn, url, schema)
    if as_json:
        facts = state.facts() | {
            "applied": [each.label for each in applied.steps],
            "functions_replaced": applied.functions,
        }
        click.echo(json.dumps(facts if known is None else facts | {"roles": known}))
        return
    for each in applied.steps:
        click.echo(f"applied {each.label}")
    if applied.functions and not applied.steps:
        click.echo("replaced the functions")
    _report(state)
    for kind, roles in (known or {}).items():
        click.echo(clean(f"{kind:<13}  {', '.join(roles) or '(none)'}"))


def _refuse_older(state: State, target: int) -> None:
    """Functions have no versions: this build can only make its newest schema."""
    if state.version < target:
        raise InvalidOption(
            f"--to is {target}; this Howdah can only migrate to version {sql.latest_version()}, which its "
            f"functions need. Run `howdah migrate` of the release whose newest version is {target}."
        )


def _grant(conn: Connection, schema: str, asked: str) -> dict[str, list[str]]:
    try:
        return sql_steps.drive(
            conn, sql_steps.with_retries(lambda: grants.steps(schema, grants.parse(asked)))
        )
    except UndefinedObject as error:
        raise HowdahError(
            f"{error.diag.message_primary}; nothing was granted. Create it first, as in: CREATE ROLE "
            "name LOGIN."
        ) from error
    except InsufficientPrivilege as error:
        raise HowdahError(
            f'role "{conn.info.user}" may not grant privileges on schema "{schema}": '
            f"{error.diag.message_primary}; nothing was granted. Run it as the schema's owner, with "
            "CREATEROLE if roles are to be created, or as a superuser; or create the roles and name them, as "
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
            click.echo(f"missing {each.label}")
        _report(state)
    click.get_current_context().exit(0 if state.is_whole else 1)


def _report(state: State) -> None:
    for each in state.differences:
        click.echo(clean(str(each)))
    click.echo(clean(state.sentence()))
    for line in state.advice():
        click.echo(clean(line))


def _print_sql(
    database: str | None, schema: str, after: str | None, as_json: bool, asked: str | None
) -> None:
    version, functions_needed = _starting_point(database, schema, after)
    needed = functions_needed or bool(sql.release().pending(version))
    text = migrate.full_script(schema, version) if needed else ""
    if asked is not None:
        text += f"\nBEGIN;\n{grants.script(schema, grants.parse(asked))}COMMIT;\n"
    if as_json:
        return click.echo(json.dumps({"schema": schema, "from": version, "sql": text}))
    if not text:
        return click.echo(f'-- Schema "{schema}" is up to date at version {version}.')
    return click.echo(text, nl=False)


def _starting_point(database: str | None, schema: str, after: str | None) -> tuple[int, bool]:
    """The version to start from, and whether the functions are needed although no step is pending."""
    if after is None:
        return 0, False
    if after == "current":
        url = resolve_url(database)
        with connect(url) as conn:
            state = _read_state(conn, url, schema)
        return state.version, state.functions_needed
    if not after.isdecimal():
        raise InvalidOption(f'--from is "{after}"; it must be a version number or `current`.')
    return int(after), False


def _read_state(conn: Connection, url: str, schema: str) -> State:
    try:
        installed, functions_needed, found = sql_steps.drive(conn, migrate.inspect(schema))
    except DatabaseError as error:
        raise _refusal(url, schema, error) from error
    return State(
        schema=schema,
        place=database_url.redact(url),
        installed=installed,
        functions_needed=functions_needed,
        differences=found,
    )


def _refusal(url: str, schema: str, error: DatabaseError) -> HowdahError:
    if isinstance(error, ConnectionFailed) and (error.sqlstate or "08")[:2] in {"08", "57"}:
        return unreachable(url, error)
    reason = error.diag.message_primary or str(error)
    if error.sqlstate == "25006":
        return HowdahError(
            f'schema "{schema}" cannot be read or migrated on a read-only server by a role that is not its owner: '
            f"{reason}. Connect as the schema's owner to check it, or point the URL at the primary."
        )
    advice = error.diag.message_hint or (
        "Run `howdah migrate` as a role with the privileges, or run what `howdah migrate --sql` prints."
    )
    return HowdahError(
        f'the database refused to migrate schema "{schema}": {reason}. Nothing was changed. {advice}'
    )
