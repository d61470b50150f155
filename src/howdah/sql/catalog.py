"""Compares what a schema contains with what it contained after its last migration.

`catalog.sql` reads both as {object: definition}. This module finds the differences and the statements that repair
them; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Catalog: TypeAlias = Mapping[str, str]
"""Definitions by object, such as "index live_jobs_pending"."""

PRINTED_BY = "printed by"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One object that is not as the last migration left it."""

    kind: str
    name: str
    problem: str
    """missing, altered or unexpected."""
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        text = f"{self.problem} {self.kind} {self.name}"
        if self.problem == "altered" and self.kind != "function":
            text += f': it is "{self.found}" and should be "{self.expected}"'
        return text

    def repair(self) -> list[str]:
        """The statements that repair it, with search_path set to the schema; none where data may be lost."""
        if self.kind == "view" and self.expected is not None:
            return [f"CREATE OR REPLACE VIEW {self.name} AS {self.expected.rstrip(';')}"]
        if self.expected is None or self.kind not in {"constraint", "index", "trigger"}:
            return []
        table, _, name = self.name.rpartition(".")
        if self.kind == "constraint":
            drop = f"ALTER TABLE {table} DROP CONSTRAINT {name}"
            create = f"ALTER TABLE {table} ADD CONSTRAINT {name} {self.expected}"
        elif self.kind == "trigger":
            drop, create = f"DROP TRIGGER {name} ON {table}", self.expected
        else:
            # ON ONLY would make an index of the parent without its partitions.
            drop, create = f"DROP INDEX {name}", self.expected.replace(" ON ONLY ", " ON ", 1)
        return [create] if self.problem == "missing" else [drop, create]

    def facts(self) -> dict[str, object]:
        """For programs."""
        return {
            "problem": self.problem,
            "kind": self.kind,
            "name": self.name,
            "expected": self.expected,
            "found": self.found,
            "repair": self.repair(),
        }


def differences(expected: Catalog, present: Catalog) -> list[Difference]:
    """How `present` differs from `expected`. Additional indexes and relations are the users' and allowed.

    After a major upgrade of PostgreSQL, which may print definitions differently, an object counts as altered only
    when a later migration has stored how this server prints it.
    """
    comparable = is_comparable(expected, present)
    found = []
    for key in sorted((expected.keys() | present.keys()) - {PRINTED_BY}):
        kind, _, name = key.partition(" ")
        if key not in present:
            if kind == "column" and _is_of_missing_view(name, expected, present):
                continue
            problem = "missing"
        elif key not in expected:
            if not _belongs_to(expected, kind, name):
                continue
            problem = "unexpected"
        elif comparable and expected[key] != present[key]:
            problem = "altered"
        else:
            continue
        found.append(
            Difference(
                kind=kind,
                name=name,
                problem=problem,
                expected=expected.get(key),
                found=present.get(key),
            )
        )
    return found


def _is_of_missing_view(name: str, expected: Catalog, present: Catalog) -> bool:
    view = f"view {name.partition('.')[0]}"
    return view in expected and view not in present


def is_comparable(expected: Catalog, present: Catalog) -> bool:
    """Whether both were printed in the same way."""
    return expected.get(PRINTED_BY) == present.get(PRINTED_BY)


def _belongs_to(expected: Catalog, kind: str, name: str) -> bool:
    """Whether an additional object changes something of ours: a function, or a part of one of our relations."""
    relation = name.partition(".")[0]
    return kind == "function" or (
        kind in {"column", "constraint", "trigger"}
        and (f"table {relation}" in expected or f"view {relation}" in expected)
    )
