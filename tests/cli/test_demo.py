"""`howdah demo` in a real terminal, piped, and interrupted."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from howdah import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [sys.executable, "-m", "howdah", "demo"]
ESCAPE = "\x1b["


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the demo puts its temporary files; whatever is still there afterwards is left over."""
    with tempfile.TemporaryDirectory(prefix="howdah-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def environment(place: Path, **more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}}
    return inherited | {"TMPDIR": str(place), "TERM": "xterm-256color"} | more


def nothing_is_left(place: Path) -> bool:
    """Whether neither a file nor a server of the demo's is there any more."""
    servers = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
        except OSError:
            continue
        if os.fsencode(place) in command:
            servers.append(command)
    return not list(place.iterdir()) and not servers


class Terminal:
    """The demo in a pseudo-terminal of 80 columns."""

    def __init__(self, place: Path, **more: str) -> None:
        self.screen = ""
        pid, self._file = pty.fork()
        if pid == 0:
            variables = environment(place, COLUMNS="80", LINES="40", **more)
            os.execve(sys.executable, COMMAND, variables)  # noqa: S606
        self._pid = pid

    def read(self, until: str | None = None, timeout: float = 30) -> str:
        """Read until some text appeared, or to the end."""
        deadline = time.monotonic() + timeout
        while until is None or until not in self.screen:
            ready, _, _ = select.select([self._file], [], [], deadline - time.monotonic())
            assert ready, f"nothing more within {timeout} s after: {self.screen[-500:]}"
            try:
                chunk = os.read(self._file, 65536)
            except OSError:  # Linux says so instead of giving an empty answer
                chunk = b""
            if not chunk:
                break
            self.screen += chunk.decode()
        return self.screen

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait(self) -> int:
        self.read()
        _, status = os.waitpid(self._pid, 0)
        os.close(self._file)
        return os.waitstatus_to_exitcode(status)


def check_story(text: str) -> None:
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "Five jobs are enqueued" in plain
    assert "export.csv" in plain
    last = plain[plain.rindex("job_type") :]
    rows = [line.replace("|", " ").split() for line in last.splitlines()]
    statuses = {row[0]: row[1] for row in rows if row[1:] and row[1] in set(Status)}
    assert statuses == {
        "rebuild-index": "completed",
        "send-email": "completed",
        "call-service": "completed",
        "parse-upload": "failed",
        "export": "completed",
        "charge-card": "completed",
    }
    assert "LeaseLost: the lease on 1 job(s) was lost" in plain
    assert "Nothing is left of it." in plain


def test_piped_it_is_plain_text(place: Path) -> None:
    done = subprocess.run(
        COMMAND, env=environment(place), capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    check_story(done.stdout)
    assert nothing_is_left(place)


def test_an_ascii_pipe_is_no_obstacle(place: Path) -> None:
    variables = environment(place, PYTHONIOENCODING="ascii", NO_COLOR="1")
    done = subprocess.run(
        COMMAND, env=variables, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    check_story(done.stdout)


def test_in_a_terminal_it_is_live_and_coloured(place: Path) -> None:
    terminal = Terminal(place)
    assert terminal.wait() == 0
    assert f"{ESCAPE}32mcompleted" in terminal.screen
    assert "running" in terminal.screen
    check_story(terminal.screen)
    assert nothing_is_left(place)


@pytest.mark.parametrize("moment", ["Starting", "worker-1 claims"])
def test_ctrl_c_leaves_nothing_behind(place: Path, moment: str) -> None:
    terminal = Terminal(place, NO_COLOR="1")
    terminal.read(until=moment)
    terminal.type("\x03\x03")
    assert terminal.wait() == 128 + signal.SIGINT
    assert "Traceback" not in terminal.screen
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.screen), "NO_COLOR is to be respected"
    assert nothing_is_left(place)


def test_a_termination_leaves_nothing_behind(place: Path) -> None:
    with subprocess.Popen(COMMAND, env=environment(place), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"Starting" in running.stdout.readline()
        running.terminate()
    assert running.returncode == 128 + signal.SIGTERM
    assert nothing_is_left(place)


def test_it_is_shown_when_asked_for_help() -> None:
    done = subprocess.run(
        [*COMMAND[:-1], "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    assert re.search(
        r"^  demo +See jobs run on a PostgreSQL of their own", done.stdout, re.MULTILINE
    )
