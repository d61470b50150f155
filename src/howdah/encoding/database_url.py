"""Finds and parses the database URL: argument, environment, and the forms that a URL may have.

Opens nothing. `howdah.embedded` starts an embedded server.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = ("HOWDAH_DATABASE_URL", "DATABASE_URL")
EMBEDDED = "embedded:"
SCHEMES = ("postgresql", "postgres")
DRIVERS = ("asyncpg", "psycopg", "psycopg_async", "psycopg2")
# asyncpg would send these options of libpq to the server as settings, and the server would refuse.
LIBPQ_ONLY = frozenset(
    {
        "channel_binding",
        "connect_timeout",
        "gssencmode",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "sslcompression",
        "sslsni",
        "tcp_user_timeout",
    }
)


def database_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The argument, or else HOWDAH_DATABASE_URL, or else DATABASE_URL."""
    url = argument or next(filter(None, map(environ.get, VARIABLES)), None)
    # Bytes that are not valid UTF-8 arrive from a shell as lone surrogates.
    if url is not None and ("\x00" in url or any("\ud800" <= each <= "\udfff" for each in url)):
        raise unreadable_url()
    return url


def is_embedded(url: str) -> bool:
    """Whether the URL asks for an embedded server: `embedded:` or `embedded:/some/directory`."""
    return url.startswith(EMBEDDED)


def embedded_directory(url: str) -> str | None:
    """The directory in an `embedded:` URL, or None for the default directory."""
    path = url.removeprefix(EMBEDDED)
    return path.removeprefix("//") or None


def normalize_url(url: str) -> str:
    """Convert a URL to a `postgresql://` URL that both psycopg and asyncpg accept.

    Options that only libpq has are removed, and SQLAlchemy's `ssl=` becomes `sslmode=`.
    """
    scheme, separator, rest = url.strip().partition("://")
    dialect, _, driver = scheme.lower().partition("+")
    if not separator or dialect not in SCHEMES or (driver and driver not in DRIVERS):
        # Text that does not look like a scheme may be a misplaced password, so it is not shown.
        plain = separator and re.fullmatch(r"[A-Za-z0-9+_]+", scheme)
        raise InvalidOption(
            f"the database URL begins with {f'{scheme}://' if plain else 'no scheme'}, which is not "
            "PostgreSQL's; write it as postgresql://user:password@host:5432/database, or as embedded:"
        )
    user, at, host = rest.partition("/")[0].partition("@")
    if at and (set(user) & set("?#") or "@" in host.partition("?")[0]):
        # The drivers parse such a URL differently, and would report half of a password as the host.
        raise unreadable_url()
    base, _, query = rest.partition("?")
    options = [_option(each) for each in query.split("&") if each]
    kept = [each for each in options if each.partition("=")[0] not in LIBPQ_ONLY]
    return f"postgresql://{base}" + (f"?{'&'.join(kept)}" if kept else "")


def unreadable_url() -> InvalidOption:
    """The error for a URL that cannot be parsed."""
    # The parser's message may contain a part of the password.
    return InvalidOption(
        "the database URL cannot be read; write it as postgresql://user:password@host:5432/database, "
        "with special characters in the password percent-encoded."
    )


def redact(url: str) -> str:
    """`database "shop" at db.example.com:5432`, for messages: no user, no password."""
    host, database = host_and_database(url)
    return f'database "{database}" at {host}'


def host_and_database(url: str) -> tuple[str, str]:
    """The host and the database of a URL, without credentials."""
    base, _, query = url.partition("://")[2].partition("?")
    options = dict(parse_qsl(query))
    # Parsed by hand: urlsplit does not support a list of hosts.
    hosts, _, database = base.rpartition("@")[2].partition("/")
    host = unquote(hosts) or options.get("host", "localhost")
    return host, unquote(database) or options.get("dbname", "(default)")


def _option(each: str) -> str:
    name, _, value = each.partition("=")
    if name != "ssl":
        return each
    return f"sslmode={'require' if value == 'true' else value}"
