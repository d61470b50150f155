"""A database whose roles have the privileges of `howdah migrate --grants` and must log in with a password."""

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

PASSWORD = "hunter2-§ecret/@:%"  # contains characters that a URL must encode
ENCODED = "hunter2-%C2%A7ecret%2F%40%3A%25"
# Parts of the password in any encoding; none of them may be printed.
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
    """One database, and its URLs for the roles."""

    url: str

    def as_role(self, role: str) -> str:
        return self.url.replace("://howdah@", f"://{role}:{ENCODED}@")

    def as_kind(self, kind: str) -> str:
        return self.as_role(ROLES[kind])

    def connect(self, kind: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        """Connect as one of the four roles, or as the superuser."""
        url = self.url if kind is None else self.as_kind(kind)
        return psycopg.connect(url, **{"autocommit": True} | options)


def create_role(conn: psycopg.Connection[Any], role: str, *, options: str = "LOGIN") -> None:
    text = sql.SQL("CREATE ROLE {} {} PASSWORD {}")
    conn.execute(text.format(sql.Identifier(role), sql.SQL(options), sql.Literal(PASSWORD)))


def require_passwords(server: EmbeddedServer, cluster: Path, roles: list[str]) -> None:
    """Require a password for these roles."""
    file = cluster / "pg_hba.conf"
    names = ",".join(f'"{role}"' for role in roles)
    file.write_text(f"local all {names} scram-sha-256\n{file.read_text()}")
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("SELECT pg_reload_conf()")


def run(*arguments: object, **options: Any) -> Result:
    """Run a command in this process. It must not print a traceback."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def succeed(*arguments: object, **options: Any) -> str:
    """Run a command that must succeed; returns its output."""
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.output
