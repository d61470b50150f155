"""The planner settings of the functions: every plan has a join method that is allowed, and none is compiled.

A plan without an allowed join method costs 1e10, and a server with LLVM then compiles it, for half a second or more
on every call. The settings of a function also apply to the functions that it calls, so a function that forbids a join
method has to allow another one, whatever its caller and the session say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import call_everything, rows, value
from plans import explained

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

JOINS = ("enable_hashjoin", "enable_mergejoin", "enable_nestloop")


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def functions(conn: Connection) -> list[tuple[str, bool, dict[str, str]]]:
    """Name, whether it is an entry point, and settings of every function."""
    found = rows(
        conn,
        "SELECT proname, prosecdef, coalesce(proconfig, '{}') AS settings FROM pg_proc "
        "WHERE pronamespace = 'howdah'::regnamespace",
    )
    assert len(found) > 40
    return [
        (row.proname, row.prosecdef, dict(setting.split("=", 1) for setting in row.settings))
        for row in found
    ]


def test_no_entry_point_lets_its_statements_be_compiled(functions: Any) -> None:
    compiled = [
        name for name, entry, settings in functions if entry and settings.get("jit") != "off"
    ]
    assert compiled == []


def test_a_function_that_forbids_a_join_method_allows_another(functions: Any) -> None:
    pinned = {
        name: [settings.get(join) for join in JOINS]
        for name, _, settings in functions
        if any(join in settings for join in JOINS)
    }
    assert len(pinned) > 10
    wrong = {
        name: set_to
        for name, set_to in pinned.items()
        if sorted(map(str, set_to)) != ["off", "off", "on"]
    }
    assert wrong == {}


@pytest.fixture(params=JOINS)
def unkind(conn: Connection, request: pytest.FixtureRequest) -> Connection:
    """A session that forbids a join method, and compiles every plan that it may."""
    conn.execute(f"SET {request.param} = off".encode())
    conn.execute("SET jit = on")
    conn.execute("SET jit_above_cost = 0")
    return conn


def test_no_statement_of_a_function_is_compiled(unkind: Connection) -> None:
    if not value(unkind, "SELECT pg_jit_available()"):
        pytest.skip("this PostgreSQL cannot compile plans")
    with explained(unkind) as nodes:
        call_everything(unkind)
    inner = [node for node in nodes if "howdah." not in node.query]
    assert len(inner) > 100
    assert [str(node) for node in inner if node.compiled] == []
    assert [node for node in nodes if node.compiled], "the server compiles nothing at all"


def test_no_statement_of_a_function_lacks_an_allowed_join_method(unkind: Connection) -> None:
    with explained(unkind) as nodes:
        call_everything(unkind)
    # A cross join, or one with a function of the other side, is a nested loop in any case.
    arrays = ("unnest", "VALUES", "jsonb_array_elements")
    joins = [node for node in nodes if node.kind in ("Nested Loop", "Hash Join", "Merge Join")]
    tables = [node for node in joins if not any(word in node.query for word in arrays)]
    assert len(tables) < len(joins)
    assert [str(node) for node in tables if node.disabled] == []
