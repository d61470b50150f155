"""An embedded PostgreSQL: one server per directory, shared by every process that names it.

Owns the server's life: `initdb`, start, stop, removal, and which URL leads to it. Finding the
programs and the account they run as is left to `binaries.py`.

    .howdah/pg18/howdah.lock  held by the server itself, see below
    .howdah/pg18/cluster/     PostgreSQL's data (for root a symlink, where its own account cannot go)
    .howdah/pg18/server.log
    /tmp/howdah-<uid>-<hash>/ the Unix socket; there is no TCP port

**The lock.** Whoever starts the server locks the file and hands the open file on to it, so the lock
is free exactly when no starter, no postmaster and none of its children is left. That one fact
serves ten processes starting at once, a starter that was killed, the orphans of a postmaster that was
killed, a zombie and a reused process id: holding the lock, a `postmaster.pid` is known to be stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from howdah.embedded.binaries import (
    Account,
    find_binaries,
    is_in_state_directory,
    require,
    state_directory,
)
from howdah.encoding import database_url
from howdah.errors import EmbeddedServerError, NoDatabase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from howdah.embedded.binaries import Binaries

HOME = ".howdah"
SERVER = "pg18"
NAME = "howdah"  # of the database and of its superuser
PORT = 5432  # part of the socket's file name only
POLL = 0.02
PROBE = 3.0
LOG_LIMIT = 16 * 2**20
# Durable, quiet and private.
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "log_checkpoints": "off",
}


class Postmaster(NamedTuple):
    """What a running server says about itself in `postmaster.pid`."""

    pid: int
    socket_directory: Path
    ready: bool


class EmbeddedServer:
    """The PostgreSQL server of a directory. Making one does nothing; `start` does.

    `settings` are server parameters for the start that this object performs; a server that is
    already running keeps its own.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        bin_directory: Path | None = None,
    ) -> None:
        chosen = Path(directory).expanduser() if directory else default_directory()
        self.directory = Path(os.path.realpath(chosen))
        self.settings = dict(settings or {})
        self._bin_directory = bin_directory
        self._cluster = self.directory / "cluster"
        self.log_file = self.directory / "server.log"
        self._older_log_file = self.directory / "server.log.1"
        self._lock_file = self.directory / "howdah.lock"

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self.directory)!r})"

    @property
    def socket_directory(self) -> Path:
        """Where the running server's socket is, or where the next one's will be."""
        if running := self._postmaster():
            return running.socket_directory
        # In /tmp, as the path of a socket may have no more than about 100 bytes.
        data = os.path.realpath(self._cluster)
        digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
        return Path(f"/tmp/{NAME}-{self._account().uid}-{digest}")  # noqa: S108

    @property
    def url(self) -> str:
        """The URL, running or not. The port is named lest PGPORT in the environment changes it."""
        return f"postgresql://{NAME}@/{NAME}?host={self.socket_directory}&port={PORT}"

    def pid(self) -> int | None:
        """The process id of the running server's postmaster."""
        running = self._postmaster()
        return running.pid if running else None

    def is_running(self) -> bool:
        """Whether it accepts connections."""
        running = self._postmaster()
        return running is not None and running.ready

    def exists(self) -> bool:
        """Whether a server was ever started here."""
        return os.path.lexists(self._cluster)

    def start(self, timeout: float = 60) -> str:
        """Start the server unless it is running, and return its URL once it accepts connections."""
        deadline = time.monotonic() + timeout
        with self._translated("started"):
            while not self.is_running():
                self._make_directory()
                with self._try_lock() as lock:
                    # A network file system may not hand locks on: ask again before launching.
                    if lock is not None and not self.is_running():
                        self._launch(lock, deadline)
                if time.monotonic() >= deadline:
                    held = "" if lock else f", as other processes still hold {self._lock_file}"
                    raise self._failure(f"did not accept connections within {timeout:g} s{held}")
                time.sleep(0 if lock else POLL)
            return self.url

    def stop(self, mode: Literal["fast", "immediate"] = "fast", timeout: float = 30) -> bool:
        """Stop the server and wait until it is gone; whether there was one to stop."""
        if not self.exists():
            return False
        with self._translated("stopped"), self._stopped(mode, timeout) as was_running:
            return was_running

    def remove(self) -> None:
        """Stop the server and delete its data, its socket and whatever else `start` made."""
        if not self._lock_file.exists():
            return
        with self._translated("removed"), self._stopped("immediate", 30):
            shutil.rmtree(self.socket_directory, ignore_errors=True)
            data = Path(os.path.realpath(self._cluster))
            if self._cluster.is_symlink():
                self._cluster.unlink()
                # Only what root's `start` put there: a link may have been made by anyone.
                if is_in_state_directory(data):
                    shutil.rmtree(data, ignore_errors=True)
            elif (data / "PG_VERSION").exists():
                shutil.rmtree(data)
            self._remove_drafts()
            for file in (self.log_file, self._older_log_file, self._lock_file):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody keeps more in there
            self.directory.rmdir()

    def _account(self) -> Account:
        """Whom the data belong to, else who will own them."""
        try:
            return Account.of(os.stat(self._cluster).st_uid)
        except FileNotFoundError:
            return Account.for_new_server()

    def _postmaster(self) -> Postmaster | None:
        """The server that listens, if one does."""
        with self._translated("inspected"):
            try:
                lines = (self._cluster / "postmaster.pid").read_text().splitlines()
            except (FileNotFoundError, NotADirectoryError):
                return None
        if len(lines) < 5 or not lines[4]:  # it is being written
            return None
        # The file outlives a killed server and its process id may be another's by now; only the
        # server itself listens on the socket.
        answers = _probe(Path(lines[4]) / f".s.PGSQL.{PORT}")
        if answers is None:
            return None
        return Postmaster(int(lines[0]), Path(lines[4]), answers and lines[-1].strip() == "ready")

    def _make_directory(self) -> None:
        home = self.directory.parent
        if home.name == HOME and not home.exists():
            home.mkdir(mode=0o755, parents=True, exist_ok=True)
            (home / ".gitignore").write_text("*\n")
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _try_lock(self) -> Iterator[int | None]:
        """The lock's file descriptor, or None while somebody else has it.

        It is given back by closing, never by LOCK_UN, which would take it from the server as well.
        """
        descriptor = self._open(self._lock_file, os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # `remove` may have deleted this very file in between.
                ours = os.path.samestat(os.fstat(descriptor), os.stat(self._lock_file))
            except (BlockingIOError, FileNotFoundError):
                ours = False
            yield descriptor if ours else None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _stopped(self, mode: Literal["fast", "immediate"], timeout: float) -> Iterator[bool]:
        """Stop the server and keep others from starting it; yields whether it was running."""
        number = signal.SIGINT if mode == "fast" else signal.SIGQUIT
        deadline = time.monotonic() + timeout
        signalled = False
        while True:
            with self._try_lock() as lock:
                if lock is not None:
                    yield signalled
                    return
            if not signalled and (running := self._postmaster()):
                os.kill(running.pid, number)
                signalled = True
            if time.monotonic() >= deadline:
                raise self._failure(f"did not stop within {timeout:g} s")
            time.sleep(POLL)

    def _launch(self, lock: int, deadline: float) -> None:
        account = self._account()
        if os.geteuid() not in (0, account.uid):
            raise EmbeddedServerError(
                f"the embedded PostgreSQL in {self.directory} belongs to user {account.name}, and only "
                "that user or root can start it. Name another directory to have a server of your own."
            )
        named = self._bin_directory
        binaries = require(named, "bin_directory") if named else find_binaries()
        binaries = binaries.reachable_by(account)
        if not self.exists():
            self._create_cluster(lock, binaries, account, deadline)
        binaries.check_data(self._cluster)
        sockets = self._make_socket_directory(account)
        for stale in (self._cluster / "postmaster.pid", *sockets.glob(".s.PGSQL.*")):
            stale.unlink(missing_ok=True)  # the lock is ours, so its writer is gone
        settings = SETTINGS | self.settings
        settings |= {"port": str(PORT), "unix_socket_directories": str(sockets)}
        options = " ".join(f"-c {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
        limit = max(1, math.ceil(deadline - time.monotonic()))
        command = [binaries.program("pg_ctl"), "start", "--silent", "--wait"]
        command += [f"--timeout={limit}", f"--options={options}"]
        # The directory goes by environment: pg_ctl does not quote it for its shell.
        environment = {"PGDATA": os.path.realpath(self._cluster)}
        with self._log() as log:
            done = account.run(command, env=environment, stdout=log, pass_fds=(lock,))
        if done.returncode != 0:
            raise self._failure("did not start")

    def _create_cluster(self, lock: int, binaries: Binaries, account: Account, end: float) -> None:
        """Initialise a draft, then move it into place: a killed `initdb` leaves no half cluster."""
        self._remove_drafts()
        here = account.can_enter(self.directory)
        parent = self.directory if here else state_directory(account, "clusters")
        draft = Path(tempfile.mkdtemp(prefix="draft-" if here else "", dir=parent))
        try:
            if os.geteuid() == 0:
                os.chown(draft, account.uid, account.gid)
            with self._log() as log:
                for command, text in binaries.initialisation(draft, NAME):
                    limit = max(0.0, end - time.monotonic())
                    files = {"stdout": log, "pass_fds": (lock,)}
                    done = account.run(command, input=text, timeout=limit, **files)
                    if done.returncode != 0:
                        raise self._failure("could not be initialised")
            if here:
                draft.rename(self._cluster)
            else:
                self._cluster.symlink_to(draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _remove_drafts(self) -> None:
        for draft in self.directory.glob("draft-*"):
            shutil.rmtree(draft, ignore_errors=True)

    def _make_socket_directory(self, account: Account) -> Path:
        path = self.socket_directory
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.lstat().st_uid == os.geteuid() == 0:
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
        facts = path.lstat()
        # Anyone may have taken the name in /tmp before us.
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != account.uid or facts.st_mode & 0o077:
            raise EmbeddedServerError(
                f"{path} is not a private directory of user {account.name}, so the server's socket "
                "would not be safe in it. Find out who made it, and remove it."
            )
        return path

    @contextlib.contextmanager
    def _log(self) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > LOG_LIMIT:
                self.log_file.rename(self._older_log_file)
        descriptor = self._open(self.log_file, os.O_WRONLY | os.O_APPEND)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, path: Path, flags: int) -> int:
        """Open a file of the directory's owner, who must be able to use what root made in it."""
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return os.open(path, flags | os.O_NOFOLLOW)
        if os.geteuid() == 0:
            owner = self.directory.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return descriptor

    def _failure(self, what: str) -> EmbeddedServerError:
        message = f"the embedded PostgreSQL in {self.directory} {what}."
        with contextlib.suppress(OSError):
            tail = self.log_file.read_text(errors="replace").splitlines()[-10:]
            message += f" {self.log_file} ends with:\n" + "\n".join(f"  {line}" for line in tail)
        return EmbeddedServerError(message)

    @contextlib.contextmanager
    def _translated(self, done: str) -> Iterator[None]:
        """Errors of the operating system, as a sentence about this server."""
        try:
            yield
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedServerError(
                f"the embedded PostgreSQL in {self.directory} could not be {done}: {error}. "
                "Check who owns that directory, or name another one."
            ) from error


def find_directory(start: Path | None = None) -> Path | None:
    """The `.howdah/pg18` that `howdah db start` made, in this directory or above."""
    made = (home / SERVER for home in _homes(start))
    return next((place for place in made if os.path.lexists(place / "cluster")), None)


def default_directory() -> Path:
    """The one that was made, else one in the nearest `.howdah`, else in a new one right here."""
    return find_directory() or next(_homes(), Path.cwd() / HOME) / SERVER


def resolve_url(argument: str | None = None) -> str:
    """The database to use, its embedded server started where one was asked for.

    Never creates one that nobody named: two containers that each did would lose each other's jobs.
    """
    url = database_url.database_url(argument)
    if url is None:
        directory = find_directory()
        if directory is None:
            raise NoDatabase
        return EmbeddedServer(directory).start()
    if database_url.is_embedded(url):
        return EmbeddedServer(database_url.embedded_directory(url)).start()
    return database_url.normalize_url(url)


def _homes(start: Path | None = None) -> Iterator[Path]:
    here = (start or Path.cwd()).absolute()
    for directory in (here, *here.parents):
        home = directory / HOME
        # Like git, ignore what a third party left in a directory above, such as /tmp.
        if os.path.isdir(home) and home.stat().st_uid in (os.geteuid(), 0):
            yield home


def _probe(address: Path) -> bool | None:
    """Whether the server at a socket answers, or None where nobody listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE)
        try:
            probe.connect(str(address))
            # "Do you speak TLS?" is answered by a process that the postmaster forks for it; merely
            # connecting also works while it is dying.
            probe.sendall(struct.pack("!ii", 8, 80877103))
            return probe.recv(1) != b"" or None
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return None
