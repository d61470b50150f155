"""Decides which database to use, and starts the embedded server if that is the one."""

from __future__ import annotations

from howdah.embedded.directory import find_directory
from howdah.embedded.server import EmbeddedServer
from howdah.encoding import database_url
from howdah.errors import NoDatabase


def resolve_url(argument: str | None = None) -> str:
    """The URL of the database to use. If that is an embedded server, start it.

    Never creates a server that was not asked for: two containers with a private server each would not see
    each other's jobs.
    """
    url = database_url.database_url(argument)
    if url is None:
        directory = find_directory()
        if directory is None:
            raise NoDatabase
        return EmbeddedServer(directory).start()
    if database_url.is_embedded(url):
        return EmbeddedServer(database_url.embedded_directory(url)).start()
    return database_url.normalize_url(url)
