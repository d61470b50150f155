"""The pytest fixtures. pytest loads this module wherever Howdah is installed, so it is outside the package
and imports it only when a fixture is used."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--howdah-database-url` and its settings."""
    about = (
        "an existing database for howdah_database to use instead of an embedded PostgreSQL; "
        "{worker} is replaced by the name of the xdist worker"
    )
    parser.getgroup("howdah").addoption("--howdah-database-url", default=None, help=about)
    parser.addini("howdah_database_url", about, default="")
    parser.addini(
        "howdah_schema", "the schema of the app under test; {worker} as above", default="howdah"
    )


@pytest.fixture(scope="session")
def _howdah_session(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    from howdah.encoding.database_url import normalize_url
    from howdah.testing.database import session_schema, session_server

    def setting(name: str) -> str:
        chosen = str(request.config.getini(name))
        if name == "howdah_database_url":
            chosen = request.config.getoption("--howdah-database-url") or chosen
        return chosen.replace("{worker}", os.environ.get("PYTEST_XDIST_WORKER", "main"))

    given = setting("howdah_database_url")
    with contextlib.ExitStack() as session:
        url = normalize_url(given) if given else session.enter_context(session_server())
        temporary_schema = session_schema(url, setting("howdah_schema"), drop=bool(given))
        schema = session.enter_context(temporary_schema)
        yield url, schema.empty


@pytest.fixture
def howdah_database(
    _howdah_session: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> str:
    """An empty queue for this test, on a PostgreSQL that is started once per session. Its URL is also in
    HOWDAH_DATABASE_URL, which `App()` and `JobQueue()` use if they are given no database."""
    url, empty = _howdah_session
    empty()
    monkeypatch.setenv("HOWDAH_DATABASE_URL", url)
    return url
