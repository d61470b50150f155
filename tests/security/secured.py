"""A database whose roles have the rights of `howdah migrate --grants`, and need a password to get in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from click.testing import CliRunner, Result
from psycopg import sql

from howdah.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from howdah.embedded import EmbeddedServer

PASSWORD = "hunter2-§ecret/@:%"  # what a URL must encode
ENCODED = "hunter2-%C2%A7ecret%2F%40%3A%25"
# Whatever it is written like, none of these may be seen.
PIECES = ("hunter2", "ecret/@", "%C2%A7ecret")
ROLES = {
    "producer": "app_web",
    "worker": "app_worker",
    "observer": "grafana",
    "administrator": "ops",
}
GRANTS = ",".join(f"{kind}={role}" for kind, role in ROLES.items())


@dataclass(frozen=True, slots=True)
class Secured:
    """One database, and the ways into it."""

    url: str

    def as_role(self, role: str) -> str:
        return self.url.replace("://howdah@", f"://{role}:{ENCODED}@")

    def as_kind(self, kind: str) -> str:
        return self.as_role(ROLES[kind])

    def connect(self, kind: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        """As one of the four, or as the superuser."""
        url = self.url if kind is None else self.as_kind(kind)
        return psycopg.connect(url, **{"autocommit": True} | options)


def make_role(conn: psycopg.Connection[Any], role: str, *, options: str = "LOGIN") -> None:
    text = sql.SQL("CREATE ROLE {} {} PASSWORD {}")
    conn.execute(text.format(sql.Identifier(role), sql.SQL(options), sql.Literal(PASSWORD)))


def ask_for_passwords(server: EmbeddedServer, cluster: Path, roles: list[str]) -> None:
    """Let nobody in under these names without a password."""
    file = cluster / "pg_hba.conf"
    names = ",".join(f'"{role}"' for role in roles)
    file.write_text(f"local all {names} scram-sha-256\n{file.read_text()}")
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("SELECT pg_reload_conf()")


def run(*arguments: object, **options: Any) -> Result:
    """A command in this process. Whatever goes wrong, it is no traceback."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def succeed(*arguments: object, **options: Any) -> str:
    """What a command printed, which must have worked."""
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.output
