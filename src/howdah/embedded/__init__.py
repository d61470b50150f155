"""The embedded PostgreSQL server, and `resolve_url`, which starts it if it is the database to use."""

from howdah.embedded.server import EmbeddedServer
from howdah.embedded.url import resolve_url

__all__ = ["EmbeddedServer", "resolve_url"]
