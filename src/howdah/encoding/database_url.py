"""Which database, as far as text can tell: argument, environment, and the forms a URL may have.

Pure: reads a mapping, opens nothing. Starting an embedded server is left to `embedded.py`.
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
# libpq's own: asyncpg would send them to the server as settings, which refuses the connection.
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
    """The first that is set of the argument, HOWDAH_DATABASE_URL and DATABASE_URL."""
    url = argument or next(filter(None, map(environ.get, VARIABLES)), None)
    # A shell hands over what is not Unicode as halves of surrogate pairs.
    if url is not None and ("\x00" in url or any("\ud800" <= each <= "\udfff" for each in url)):
        raise unreadable_url()
    return url


def is_embedded(url: str) -> bool:
    """Whether the URL asks for an embedded server: `embedded:` or `embedded:/some/directory`."""
    return url.startswith(EMBEDDED)


def embedded_directory(url: str) -> str | None:
    """The directory that an `embedded:` URL names, or None for the default one."""
    path = url.removeprefix(EMBEDDED)
    return path.removeprefix("//") or None


def normalize_url(url: str) -> str:
    """The same database as a `postgresql://` URL that psycopg and asyncpg both accept.

    Options that only libpq has are left out, and SQLAlchemy's `ssl=` becomes `sslmode=`.
    """
    scheme, separator, rest = url.strip().partition("://")
    dialect, _, driver = scheme.lower().partition("+")
    if not separator or dialect not in SCHEMES or (driver and driver not in DRIVERS):
        # Whatever is not plainly a scheme may be a password in the wrong place: it is not shown.
        plain = separator and re.fullmatch(r"[A-Za-z0-9+_]+", scheme)
        raise InvalidOption(
            f"the database URL begins with {f'{scheme}://' if plain else 'no scheme'}, which is not "
            "PostgreSQL's; write it as postgresql://user:password@host:5432/database, or as embedded:"
        )
    user, at, host = rest.partition("/")[0].partition("@")
    if at and (set(user) & set("?#") or "@" in host.partition("?")[0]):
        # The drivers read such a URL in two ways, and would call half of a password a host.
        raise unreadable_url()
    base, _, query = rest.partition("?")
    options = [_option(each) for each in query.split("&") if each]
    kept = [each for each in options if each.partition("=")[0] not in LIBPQ_ONLY]
    return f"postgresql://{base}" + (f"?{'&'.join(kept)}" if kept else "")


def unreadable_url() -> InvalidOption:
    """What to raise for a URL that no parser understands."""
    # The parsers' own words may hold a part of the password.
    return InvalidOption(
        "the database URL cannot be read; write it as postgresql://user:password@host:5432/database, "
        "with special characters in the password percent-encoded."
    )


def redact(url: str) -> str:
    """`database "shop" at db.example.com:5432`, for messages: no user, no password."""
    host, database = host_and_database(url)
    return f'database "{database}" at {host}'


def host_and_database(url: str) -> tuple[str, str]:
    """Where a URL leads, without any credentials."""
    base, _, query = url.partition("://")[2].partition("?")
    options = dict(parse_qsl(query))
    # By hand: urlsplit knows no list of hosts.
    hosts, _, database = base.rpartition("@")[2].partition("/")
    host = unquote(hosts) or options.get("host", "localhost")
    return host, unquote(database) or options.get("dbname", "(default)")


def _option(each: str) -> str:
    name, _, value = each.partition("=")
    if name != "ssl":
        return each
    return f"sslmode={'require' if value == 'true' else value}"
