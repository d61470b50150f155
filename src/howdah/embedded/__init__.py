"""An embedded PostgreSQL: `EmbeddedServer` is all that others need."""

from howdah.embedded.server import EmbeddedServer
from howdah.embedded.url import resolve_url

__all__ = ["EmbeddedServer", "resolve_url"]
