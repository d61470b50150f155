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

from howdah.cli.commands.demo import Demo, Story, Voice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah import JobQueue

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

    def __init__(self, place: Path, *options: str, **more: str) -> None:
        self.screen = ""
        pid, self._file = pty.fork()
        if pid == 0:
            variables = environment(place, COLUMNS="80", LINES="40", **more)
            os.execve(sys.executable, [*COMMAND, *options], variables)  # noqa: S606
        self._pid = pid

    def read(self, until: str | None = None, timeout: float = 120) -> str:
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


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def totals(text: str) -> dict[str, int]:
    """The count at the end, as printed."""
    last = plain(text)[plain(text).rindex("Counted in the database") :]
    return {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^([a-z]+) +([0-9,]+) *$", last, re.MULTILINE)
    }


def test_every_total_on_the_screen_is_what_the_database_says(place: Path) -> None:
    terminal = Terminal(place, "--pause")
    terminal.read(until="Press Enter")
    screen = " ".join(plain(terminal.screen).split())
    pid, job = re.search(r"kill -9 (\d+), in the middle of job ([0-9a-f-]{36})", screen).groups()
    assert not Path(f"/proc/{pid}").exists(), "the worker was to be killed for real"
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
    assert f":{pid}:" not in killed[2], "another worker was to finish it"
    terminal.type("\r")
    assert terminal.wait() == 0
    assert "howdah db start" in plain(terminal.screen), "it says what to type next"
    assert nothing_is_left(place)


def test_without_recovery_the_killed_job_is_lost_and_it_says_so_in_plain_text(place: Path) -> None:
    variables = environment(
        place, HOWDAH_DEMO_PATIENCE="10", PYTHONIOENCODING="ascii", NO_COLOR="1"
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
    assert nothing_is_left(place)


def test_a_program_reads_what_happened_as_objects(place: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], env=environment(place), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    by_event = {each["event"]: each for each in told}
    assert [*dict.fromkeys(each["event"] for each in told if each["event"] != "progress")] == [
        "starting", "enqueued", "killed", "counted", "rescued", "removed",
    ]  # fmt: skip
    assert by_event["killed"]["pid"] in by_event["enqueued"]["workers"]
    assert by_event["rescued"]["job_id"] == by_event["killed"]["job_id"]
    counted = by_event["counted"]
    assert (counted["enqueued"], counted["completed"], counted["lost"]) == (10_204, 10_204, 0)
    assert nothing_is_left(place)


def test_jobs_that_are_slow_are_not_taken_for_lost(
    queue: JobQueue, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    run, story = Demo(Voice(as_json=True), connect(), ""), Story({}, began=0.0)
    queue.enqueue_many([("work", {})] * 3)
    for _ in range(2):
        queue.complete(queue.claim(batch_size=1))
        assert not run._is_over(story)
    story.moved -= 3600
    queue.progress(queue.claim(batch_size=1)[0], 10)
    assert not run._is_over(story)
    story.moved -= 3600
    assert run._is_over(story)  # nothing has been heard of it for an hour


@pytest.mark.parametrize("moment", ["Starting", "kill -9"])
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
