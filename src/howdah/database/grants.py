"""Which roles have which privileges on a queue: producers enqueue, workers run jobs, observers read, the
administrator owns the schema. `sql/access/` grants them; this module names the roles.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from howdah import sql
from howdah.database.migrate import begin, find_owner, literal, run_as_owner
from howdah.database.sql_steps import Query, Script
from howdah.encoding.validation import check_option_text
from howdah.errors import InvalidOption, did_you_mean

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


_READ_RECORDED = "SELECT coalesce(jsonb_agg(jsonb_build_array(kind, role)), '[]')::text FROM grants"
_RECORD = """
DELETE FROM grants;
INSERT INTO grants (kind, role)
SELECT g ->> 0, g ->> 1 FROM jsonb_array_elements(current_setting('howdah.granted')::jsonb) AS g;
"""


def script(schema: str, roles: Roles | None) -> str:
    """SQL that grants privileges to exactly these roles, to run inside a transaction."""
    asked = "" if roles is None else json.dumps(roles)
    return (
        f"{run_as_owner(schema, _READ_RECORDED, returns='text')}"
        f"{find_owner(schema)}"
        f"SELECT set_config('howdah.roles', {literal(asked)}, true);\n"
        f"{sql.script('access/roles')}"
        f"{run_as_owner(schema, _RECORD + sql.script('access/grants'))}"
    )


def steps(schema: str, roles: Roles | None) -> Generator[Query | Script, Any, dict[str, list[str]]]:
    """Grant privileges to exactly these roles. Returns the roles that have some now."""
    yield from begin(schema)
    yield Script(script(schema, roles))
    rows = yield Query(
        "SELECT g ->> 0, g ->> 1 FROM jsonb_array_elements(current_setting('howdah.granted')::jsonb) AS g "
        "UNION ALL SELECT 'administrator', pg_get_userbyid(nspowner)::text FROM pg_namespace "
        f"WHERE nspname = {literal(schema)} ORDER BY 1, 2"
    )
    yield Script("COMMIT")
    known: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, role in rows:
        known[kind].append(role)
    return known
