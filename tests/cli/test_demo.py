"""`howdah demo` in a real terminal, piped, and interrupted."""

from __future__ import annotations

import json
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
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from howdah.cli.commands.demo import Demo, Printer, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah import JobQueue

COMMAND = [sys.executable, "-m", "howdah", "demo"]
ESCAPE = "\x1b["


@pytest.fixture
def place() -> Iterator[Path]:
    """The directory for the demo's temporary files, which must be empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="howdah-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def environment(place: Path, **more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}}
    return inherited | {"TMPDIR": str(place), "TERM": "xterm-256color"} | more


def is_clean(place: Path) -> bool:
    """Whether the demo left neither a file nor a process."""
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

    def __init__(self, place: Path, *options: str, **more: str) -> None:
        self.screen = ""
        pid, self._file = pty.fork()
        if pid == 0:
            variables = environment(place, COLUMNS="80", LINES="40", **more)
            os.execve(sys.executable, [*COMMAND, *options], variables)  # noqa: S606
        self._pid = pid

    def read(self, until: str | None = None, timeout: float = 120) -> str:
        """Read until a text has appeared, or to the end."""
        deadline = time.monotonic() + timeout
        while until is None or until not in self.screen:
            ready, _, _ = select.select([self._file], [], [], deadline - time.monotonic())
            assert ready, f"nothing more within {timeout} s after: {self.screen[-500:]}"
            try:
                chunk = os.read(self._file, 65536)
            except OSError:  # Linux raises an error at the end instead of returning nothing
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


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def totals(text: str) -> dict[str, int]:
    """The totals at the end, as printed."""
    last = plain(text)[plain(text).rindex("Counted in the database") :]
    return {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^([a-z]+) +([0-9,]+) *$", last, re.MULTILINE)
    }


def test_every_printed_total_equals_the_database(place: Path) -> None:
    terminal = Terminal(place, "--pause")
    terminal.read(until="Press Enter")
    screen = " ".join(plain(terminal.screen).split())
    pid, job = re.search(r"kill -9 (\d+), in the middle of job ([0-9a-f-]{36})", screen).groups()
    assert not Path(f"/proc/{pid}").exists(), "the worker was not killed"
    url = re.search(r"postgresql://\S+", screen)[0]
    with psycopg.connect(url) as conn:
        (counted,) = conn.execute(
            "SELECT jsonb_build_object('enqueued', count(*), "
            "'completed', count(*) FILTER (WHERE status = 'completed'), "
            "'failed', count(*) FILTER (WHERE status = 'failed'), "
            "'retried', count(*) FILTER (WHERE attempts > 1 AND job_type = 'notify'), "
            "'recovered', count(*) FILTER (WHERE last_error LIKE 'the lease expired%')) "
            "FROM howdah.jobs"
        ).fetchone()
        killed = conn.execute(
            "SELECT status, attempts, worker_id FROM howdah.jobs WHERE id = %s", [job]
        ).fetchone()
    assert totals(terminal.screen) == {**counted, "lost": 0}
    assert counted["enqueued"] == counted["completed"] == 10_204
    assert counted["retried"] == 200
    assert counted["recovered"] >= 1
    assert killed[0] == "completed"
    assert killed[1] >= 2
    assert f":{pid}:" not in killed[2], "another worker must finish it"
    terminal.type("\r")
    assert terminal.wait() == 0
    assert "howdah db start" in plain(terminal.screen), "it names the next command"
    assert is_clean(place)


def test_without_recovery_jobs_are_lost_and_the_exit_code_is_1(place: Path) -> None:
    variables = environment(
        place, HOWDAH_DEMO_STALL_SECONDS="10", PYTHONIOENCODING="ascii", NO_COLOR="1"
    )
    done = subprocess.run(
        [*COMMAND, "--without-recovery"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert totals(done.stdout)["lost"] > 0
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.isascii()
    assert ESCAPE not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert is_clean(place)


def test_json_prints_one_object_per_event(place: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], env=environment(place), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    by_event = {each["event"]: each for each in printed}
    assert [*dict.fromkeys(each["event"] for each in printed if each["event"] != "progress")] == [
        "starting", "enqueued", "killed", "counted", "rescued", "removed",
    ]  # fmt: skip
    assert by_event["killed"]["pid"] in by_event["enqueued"]["workers"]
    assert by_event["rescued"]["job_id"] == by_event["killed"]["job_id"]
    counted = by_event["counted"]
    assert (counted["enqueued"], counted["completed"], counted["lost"]) == (10_204, 10_204, 0)
    assert is_clean(place)


def test_slow_jobs_do_not_count_as_lost(
    queue: JobQueue, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    run, state = Demo(Printer(as_json=True), connect(), ""), State({}, began=0.0)
    queue.enqueue_many([("work", {})] * 3)
    for _ in range(2):
        queue.complete(queue.claim(batch_size=1))
        assert not run._is_over(state)
    state.progressed_at -= 3600
    queue.progress(queue.claim(batch_size=1)[0], 10)
    assert not run._is_over(state)
    state.progressed_at -= 3600
    assert run._is_over(state)  # no progress for an hour


@pytest.mark.parametrize("moment", ["Starting", "kill -9"])
def test_ctrl_c_removes_everything(place: Path, moment: str) -> None:
    terminal = Terminal(place, NO_COLOR="1")
    terminal.read(until=moment)
    terminal.type("\x03\x03")
    assert terminal.wait() == 128 + signal.SIGINT
    assert "Traceback" not in terminal.screen
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.screen), "NO_COLOR was ignored"
    assert is_clean(place)


def test_sigterm_removes_everything(place: Path) -> None:
    with subprocess.Popen(COMMAND, env=environment(place), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"Starting" in running.stdout.readline()
        running.terminate()
    assert running.returncode == 128 + signal.SIGTERM
    assert is_clean(place)
