"""The plans of statements as they ran, also of those inside functions, by way of auto_explain."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a plan: what it does, to which relation, and how many rows it looked at; whether a setting
    disables it, and whether the plan was compiled by LLVM."""

    query: str
    kind: str
    relation: str
    rows: float
    disabled: bool
    compiled: bool

    def __str__(self) -> str:
        return (
            f"{self.kind} on {self.relation or '-'} looked at {self.rows:.0f} rows in: {self.query}"
        )


def _nodes(query: str, plan: dict[str, Any], compiled: bool) -> Iterator[Node]:
    removed = sum(
        plan.get(key, 0)
        for key in (
            "Rows Removed by Filter",
            "Rows Removed by Index Recheck",
            "Rows Removed by Join Filter",
        )
    )
    children = plan.get("Plans", [])
    given = plan["Actual Rows"]
    if plan["Node Type"] == "Sort":  # what it sorted, not what a LIMIT above it took
        given = max(given, *(child["Actual Rows"] for child in children))
    yield Node(
        " ".join(query.split()),
        plan["Node Type"],
        plan.get("Relation Name", ""),
        (given + removed) * plan["Actual Loops"],
        # Before PostgreSQL 18 a disabled node is one that costs 1e10.
        plan.get("Disabled", plan["Total Cost"] >= 1e9),
        compiled,
    )
    for child in children:
        yield from _nodes(query, child, compiled)


@contextmanager
def explained(conn: psycopg.Connection[Any]) -> Iterator[list[Node]]:
    """Collects the nodes of every plan that runs on this connection meanwhile."""
    found: list[Node] = []

    def collect(notice: psycopg.errors.Diagnostic) -> None:
        text = notice.message_primary or ""
        if "plan:" in text:
            plan = json.loads(text[text.index("{") :])
            found.extend(_nodes(plan["Query Text"], plan["Plan"], "JIT" in plan))

    conn.execute(
        "LOAD 'auto_explain';"
        "SET auto_explain.log_min_duration = 0;"
        "SET auto_explain.log_analyze = on;"
        "SET auto_explain.log_buffers = on;"
        "SET auto_explain.log_timing = off;"
        "SET auto_explain.log_nested_statements = on;"
        "SET auto_explain.log_format = json;"
        "SET client_min_messages = log"
    )
    conn.add_notice_handler(collect)
    try:
        yield found
    finally:
        conn.remove_notice_handler(collect)
        conn.execute("SET auto_explain.log_min_duration = -1; SET client_min_messages = notice")


def buffers(conn: psycopg.Connection[Any], query: str, *parameters: Any) -> int:
    """How many pages a statement touched, with all that ran inside it."""
    answer = conn.execute(
        f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {query}".encode(), parameters
    ).fetchone()
    assert answer is not None
    plan = answer[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
