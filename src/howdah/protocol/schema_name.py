"""Checks and quotes the name of the schema."""

from __future__ import annotations

from howdah.encoding.validation import check_option_text
from howdah.errors import InvalidOption

SCHEMA_NAME_LIMIT = 48  # bytes: a channel's name adds a suffix, and PostgreSQL cuts names at 63


def quote_schema(schema: str) -> str:
    """The schema's name as a quoted identifier. Raises `InvalidOption` for a name that cannot be used."""
    if not isinstance(schema, str) or not schema:
        raise InvalidOption(f"{schema!r:.100} is not a schema name.")
    if len(check_option_text(schema).encode()) > SCHEMA_NAME_LIMIT or schema.startswith("pg_"):
        raise InvalidOption(
            f'"{schema[:100]}" cannot be a schema name: it must not begin with pg_ '
            f"and be at most {SCHEMA_NAME_LIMIT} bytes long."
        )
    return '"' + schema.replace('"', '""') + '"'
