"""`howdah dev`: the server, the worker, the reload and the removal."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from stage import invoke

from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = """
from howdah import App
app = App()
own = App("postgresql://elsewhere/none")

@app.task
def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an app and no database."""
    with tempfile.TemporaryDirectory(prefix="howdah-test-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "dev_shop.py").write_text(APP)
        monkeypatch.chdir(name)
        monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/production")
        monkeypatch.delenv("HOWDAH_DATABASE_URL", raising=False)
        yield Path(name)
        EmbeddedServer(Path(name) / ".howdah/pg18").remove()


def test_an_app_runs_on_an_embedded_server_and_restarts_when_it_changes(
    project: Path, terminal: Any, piped: Any
) -> None:
    server = EmbeddedServer(project / ".howdah/pg18")
    seen = terminal("dev", "dev_shop:app", "--concurrency", 4)
    seen.read(until="worker started")
    assert server.url in seen.text
    done = piped("enqueue", "dev_shop:add", "a=1", "b=2", "--wait", "--database", server.url)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["3"])

    (project / "dev_shop.py").write_text(APP.replace("a + b", "100 * a + b"))
    seen.read(until="worker started", times=2)

    seen.interrupt()
    assert seen.wait() == 0
    assert "The database is still running; `howdah db stop` stops it." in seen.text
    assert "Traceback" not in seen.text
    assert server.is_running()

    again = terminal("dev", "dev_shop:app", "--rm", "--json")
    again.read(until="worker started")
    again.interrupt()
    assert again.wait() == 0
    printed = [json.loads(line) for line in again.text.splitlines() if line.startswith("{")]
    assert printed[0] == {"url": server.url, "directory": str(server.directory)}
    assert printed[-1] == {"removed": True, "directory": str(server.directory)}
    assert "worker started" in {each.get("message") for each in printed}
    assert not server.directory.exists()


@pytest.mark.usefixtures("project")
def test_an_app_that_cannot_run_is_one_sentence_and_starts_no_server() -> None:
    for name, sentence in (
        ("dev_shop:nothing", 'module "dev_shop" has no app named "nothing"'),
        ("nowhere:app", 'there is no module "nowhere" in '),
        ("dev_shop:own", "dev_shop:own has its own database, so `howdah dev` would not use it; run "
         "`howdah worker dev_shop:own --reload` instead."),
    ):  # fmt: skip
        result = invoke("dev", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: {sentence}")
        assert not Path(".howdah").exists()
