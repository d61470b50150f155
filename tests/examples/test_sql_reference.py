"""The SQL reference documents exactly the functions, columns and relations of the database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.embedded import EmbeddedServer

PAGE = (Path(__file__).parents[2] / "docs/reference/sql.md").read_text()


class Parameter(NamedTuple):
    name: str
    type: str
    default: str


def sections(text: str) -> dict[str, str]:
    """Every heading and the text below it."""
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """The rows of the table in a text, without its heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


FUNCTIONS = {
    name: text
    for name, text in sections(PAGE[PAGE.index("\n## Functions") :]).items()
    if "_" in name
}
INTERNAL = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("\n## Internal functions") :]))


@pytest.fixture(scope="module")
def conn(server: EmbeddedServer, template: str) -> Iterator[psycopg.Connection]:
    """A connection to the template itself, since nothing is written."""
    url = server.url.replace("/howdah?", f"/{template}?")
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("SET search_path = howdah")
        yield conn


def test_every_function_is_documented_or_listed_as_internal(conn: psycopg.Connection) -> None:
    query = "SELECT proname FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace"
    existing = {name for (name,) in conn.execute(query)}
    assert existing - FUNCTIONS.keys() - INTERNAL == set(), "missing in docs/reference/sql.md"
    assert (FUNCTIONS.keys() | INTERNAL) - existing == set(), "named in docs/reference/sql.md only"
    assert FUNCTIONS.keys() & INTERNAL == set()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_parameters_of_a_function_are_those_of_the_database(
    conn: psycopg.Connection, function: str
) -> None:
    documented = [Parameter(*row[:3]) for row in rows(FUNCTIONS[function])]
    arguments, inputs = conn.execute(
        "SELECT pg_get_function_arguments(oid), pronargs FROM pg_proc "
        "WHERE pronamespace = 'howdah'::regnamespace AND proname = %s",
        [function],
    ).fetchone() or ("", 0)
    existing = re.findall(r"(p_\w+) (.+?)(?: DEFAULT (.+?))?(?=, p_|$)", arguments)
    assert len(existing) == inputs
    assert [parameter.name for parameter in documented] == [name for name, _, _ in existing]
    for parameter, (_, kind, default) in zip(documented, existing, strict=True):
        query = f"SELECT {parameter.type!r}::regtype = {kind!r}::regtype"
        assert conn.execute(query.encode()).fetchone() == (True,), parameter
        assert bool(parameter.default) == bool(default), parameter
        if default:
            query = f"SELECT ({parameter.default})::{kind} IS NOT DISTINCT FROM ({default})::{kind}"
            assert conn.execute(query.encode()).fetchone() == (True,), parameter


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_return_type_of_a_function_is_that_of_the_database(
    conn: psycopg.Connection, function: str
) -> None:
    documented = re.search(r"Returns\s+`([^`]+)`", FUNCTIONS[function])
    assert documented, "the page does not contain its return type"
    query = (
        "SELECT pg_get_function_result(oid) FROM pg_proc "
        "WHERE pronamespace = 'howdah'::regnamespace AND proname = %s"
    )
    assert conn.execute(query, [function]).fetchone() == (documented[1],)


def test_the_columns_of_jobs_are_those_of_the_view(conn: psycopg.Connection) -> None:
    documented = [(name, kind) for name, kind, _ in rows(sections(PAGE)["jobs"])]
    query = (
        "SELECT attname, atttypid::regtype::text FROM pg_attribute "
        "WHERE attrelid = 'howdah.jobs'::regclass AND attnum > 0 ORDER BY attnum"
    )
    short = {"integer": "int", "timestamp with time zone": "timestamptz"}
    existing = [(name, short.get(kind, kind)) for name, kind in conn.execute(query)]
    assert documented == existing


def test_every_relation_is_documented(conn: psycopg.Connection) -> None:
    query = (
        "SELECT relname FROM pg_class WHERE relnamespace = 'howdah'::regnamespace "
        "AND relkind IN ('r', 'v', 'p') AND NOT relispartition"
    )
    text = PAGE[PAGE.index("\n## Relations") : PAGE.index("\n## Functions")]
    assert {name for (name,) in conn.execute(query)} - set(re.findall(r"\w+", text)) == set()
