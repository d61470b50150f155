from __future__ import annotations

import pytest


@pytest.fixture
def howdah_database(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As the fixture of the plugin, on the server under test. The plugin would start a second server in each
    xdist worker; `test_plugin.py` tests it in separate sessions."""
    monkeypatch.setenv("HOWDAH_DATABASE_URL", database)
    return database
