"""An embedded PostgreSQL: `EmbeddedServer` is all that others need."""

from howdah.embedded.server import EmbeddedServer, resolve_url

__all__ = ["EmbeddedServer", "resolve_url"]
