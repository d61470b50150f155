"""Which roles have which privileges on a queue: producers enqueue, workers run jobs, observers read, the
administrator owns the schema. `sql/access/` grants them; this module names the roles.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from howdah import sql
from howdah.database.migrate import as_owner, begin, literal
from howdah.database.sql_steps import Query, Script
from howdah.encoding.validation import check_option_text
from howdah.errors import InvalidOption, did_you_mean
from howdah.protocol.schema_name import quote_schema

KINDS = ("producer", "worker", "observer", "administrator")
NOBODY = "none"

Roles: TypeAlias = Mapping[str, Sequence[str]]
"""The names of the roles of each kind."""


def parse(text: str) -> Roles | None:
    """`producer=web,worker=jobs` as roles. None for an empty text: the roles that have privileges, or else four new
    ones that Howdah names."""
    if not text:
        return None
    roles: dict[str, list[str]] = {}
    for each in [] if text == NOBODY else text.split(","):
        kind, separator, role = (part.strip() for part in each.partition("="))
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS) or f"; there are {', '.join(KINDS)}."
            raise InvalidOption(f'unknown kind of role "{kind[:100]}"{hint}')
        if not separator or not check_option_text(role):
            raise InvalidOption(f'"{each}" names no role; write it as in {kind}=app_{kind}.')
        roles.setdefault(kind, []).append(role)
    if len(roles.get("administrator", ())) > 1:
        raise InvalidOption(
            "only one role can be the administrator, which owns the schema; make the others members of it."
        )
    return roles


def script(schema: str, roles: Roles | None) -> str:
    """SQL that grants privileges to exactly these roles, to run inside a transaction."""
    asked = "" if roles is None else json.dumps(roles)
    return (
        f"SET LOCAL search_path = {quote_schema(schema)}, pg_temp;\n"
        f"SELECT set_config('howdah.roles', {literal(asked)}, true);\n"
        f"{sql.script('access/roles')}{as_owner(schema)}{sql.script('access/grants')}"
    )


def steps(schema: str, roles: Roles | None) -> Generator[Query | Script, Any, dict[str, list[str]]]:
    """Grant privileges to exactly these roles. Returns the roles that have some now."""
    yield from begin(schema)
    yield Script(script(schema, roles))
    rows = yield Query(
        f"SELECT kind, role FROM {quote_schema(schema)}.grants UNION ALL "
        "SELECT 'administrator', pg_get_userbyid(nspowner) FROM pg_namespace "
        f"WHERE nspname = {literal(schema)} ORDER BY 1, 2"
    )
    yield Script("COMMIT")
    known: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, role in rows:
        known[kind].append(role)
    return known
