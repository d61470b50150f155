"""An embedded PostgreSQL: one server per directory, shared by every process that uses the directory.

Owns the life cycle of the server: `initdb`, start, stop, removal, and its URL. `binaries.py` finds the
programs and the account that runs them.

    .howdah/pg18/howdah.lock  held by the server itself, see below
    .howdah/pg18/cluster/     PostgreSQL's data (as root, a symlink if the server's account cannot enter)
    .howdah/pg18/server.log
    /tmp/howdah-<uid>-<hash>/ the Unix socket; there is no TCP port

**The lock.** The process that starts the server locks the file and passes the open file to the server, so
the lock is free exactly when no starting process, no postmaster and no child of it is left. This covers ten
processes that start at once, a starting process that was killed, the orphans of a killed postmaster, a
zombie and a reused process id: while we hold the lock, `postmaster.pid` is stale.
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
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from howdah.embedded.binaries import (
    Account,
    find_binaries,
    is_in_state_directory,
    require,
    state_directory,
)
from howdah.embedded.directory import HOME, default_directory
from howdah.embedded.postmaster import PORT, find_postmaster
from howdah.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from howdah.embedded.binaries import Binaries
    from howdah.embedded.postmaster import Postmaster

NAME = "howdah"  # of the database and its superuser
POLL_SECONDS = 0.02
LOG_LIMIT_BYTES = 16 * 2**20
# Durable, quiet and private.
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "log_checkpoints": "off",
}


class EmbeddedServer:
    """The PostgreSQL server of a directory. The constructor does no I/O; `start` starts the server.

    `settings` are server parameters. They apply if this object starts the server; a server that is already
    running keeps its settings.
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
        """The directory of the server's Unix socket, running or not."""
        if running := self._postmaster():
            return running.socket_directory
        # In /tmp, because the path of a socket is limited to about 100 bytes.
        data = os.path.realpath(self._cluster)
        digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
        return Path(f"/tmp/{NAME}-{self._account().uid}-{digest}")  # noqa: S108

    @property
    def url(self) -> str:
        """The URL, running or not. It names the port because PGPORT would change the default."""
        return f"postgresql://{NAME}@/{NAME}?host={self.socket_directory}&port={PORT}"

    def pid(self) -> int | None:
        """The process id of the postmaster; None if the server is not running."""
        running = self._postmaster()
        return running.pid if running else None

    def is_running(self) -> bool:
        """Whether the server accepts connections."""
        running = self._postmaster()
        return running is not None and running.ready

    def exists(self) -> bool:
        """Whether the directory has a server, running or not."""
        return os.path.lexists(self._cluster)

    def start(self, timeout: float = 60) -> str:
        """Start the server unless it is running, wait until it accepts connections, and return its URL."""
        deadline = time.monotonic() + timeout
        with self._translated_errors("started"):
            while not self.is_running():
                self._make_directory()
                with self._try_lock() as lock:
                    # On a network file system the server may not inherit the lock: check again.
                    if lock is not None and not self.is_running():
                        self._launch(lock, deadline)
                if time.monotonic() >= deadline:
                    held = "" if lock else f"; other processes still hold {self._lock_file}"
                    raise self._failure(f"did not accept connections within {timeout:g} s{held}")
                time.sleep(0 if lock else POLL_SECONDS)
            return self.url

    def stop(self, mode: Literal["fast", "immediate"] = "fast", timeout: float = 30) -> bool:
        """Stop the server and wait for its end. Returns whether it was running."""
        if not self.exists():
            return False
        with self._translated_errors("stopped"), self._stopped(mode, timeout) as was_running:
            return was_running

    def remove(self) -> None:
        """Stop the server and delete its data, its socket and every other file that `start` created."""
        if not self._lock_file.exists():
            return
        with self._translated_errors("removed"), self._stopped("immediate", 30):
            shutil.rmtree(self.socket_directory, ignore_errors=True)
            data = Path(os.path.realpath(self._cluster))
            if self._cluster.is_symlink():
                self._cluster.unlink()
                # Delete only what `start` as root created: another user may have made the link.
                if is_in_state_directory(data):
                    shutil.rmtree(data, ignore_errors=True)
            elif (data / "PG_VERSION").exists():
                shutil.rmtree(data)
            self._remove_drafts()
            for file in (self.log_file, self._older_log_file, self._lock_file):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: it has files of the user
            self.directory.rmdir()

    def _account(self) -> Account:
        """The account that owns the data, or that will own them."""
        try:
            return Account.of(os.stat(self._cluster).st_uid)
        except FileNotFoundError:
            return Account.for_new_server()

    def _postmaster(self) -> Postmaster | None:
        """The running server, if any."""
        with self._translated_errors("inspected"):
            return find_postmaster(self._cluster)

    def _make_directory(self) -> None:
        home = self.directory.parent
        if home.name == HOME and not home.exists():
            home.mkdir(mode=0o755, parents=True, exist_ok=True)
            (home / ".gitignore").write_text("*\n")
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _try_lock(self) -> Iterator[int | None]:
        """The file descriptor of the lock, or None while another process holds it.

        It is released by closing, never by LOCK_UN, which would release the server's lock as well.
        """
        descriptor = self._open(self._lock_file, os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # `remove` may have deleted this file in between.
                ours = os.path.samestat(os.fstat(descriptor), os.stat(self._lock_file))
            except (BlockingIOError, FileNotFoundError):
                ours = False
            yield descriptor if ours else None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _stopped(self, mode: Literal["fast", "immediate"], timeout: float) -> Iterator[bool]:
        """Stop the server and prevent a start while the block runs; yields whether it was running."""
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
            time.sleep(POLL_SECONDS)

    def _launch(self, lock: int, deadline: float) -> None:
        account = self._account()
        if os.geteuid() not in (0, account.uid):
            raise EmbeddedServerError(
                f"the embedded PostgreSQL in {self.directory} belongs to user {account.name}, and only "
                "that user or root can start it. Name another directory to create your own server."
            )
        named = self._bin_directory
        binaries = require(named, "bin_directory") if named else find_binaries()
        binaries = binaries.reachable_by(account)
        if not self.exists():
            self._create_cluster(lock, binaries, account, deadline)
        binaries.check_data(self._cluster)
        sockets = self._make_socket_directory(account)
        for stale in (self._cluster / "postmaster.pid", *sockets.glob(".s.PGSQL.*")):
            stale.unlink(
                missing_ok=True
            )  # we hold the lock, so the process that wrote it has ended
        settings = SETTINGS | self.settings
        settings |= {"port": str(PORT), "unix_socket_directories": str(sockets)}
        options = " ".join(f"-c {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
        limit = max(1, math.ceil(deadline - time.monotonic()))
        command = [binaries.program("pg_ctl"), "start", "--silent", "--wait"]
        command += [f"--timeout={limit}", f"--options={options}"]
        # In the environment, because pg_ctl does not quote the directory for its shell.
        environment = {"PGDATA": os.path.realpath(self._cluster)}
        with self._log() as log:
            done = account.run(command, env=environment, stdout=log, pass_fds=(lock,))
        if done.returncode != 0:
            raise self._failure("did not start")

    def _create_cluster(self, lock: int, binaries: Binaries, account: Account, end: float) -> None:
        """Initialize a draft, then move it into place: a killed `initdb` leaves no incomplete cluster."""
        self._remove_drafts()
        here = account.can_enter(self.directory)
        parent = self.directory if here else state_directory(account, "clusters")
        draft = Path(tempfile.mkdtemp(prefix="draft-" if here else "", dir=parent))
        try:
            if os.geteuid() == 0:
                os.chown(draft, account.uid, account.gid)
            with self._log() as log:
                for command, text in binaries.initialization(draft, NAME):
                    limit = max(0.0, end - time.monotonic())
                    files = {"stdout": log, "pass_fds": (lock,)}
                    done = account.run(command, input=text, timeout=limit, **files)
                    if done.returncode != 0:
                        raise self._failure("could not be initialized")
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
        # Another user may have created this name in /tmp first.
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != account.uid or facts.st_mode & 0o077:
            raise EmbeddedServerError(
                f"{path} is not a private directory of user {account.name}, so the server's socket "
                "would not be safe in it. Check who created it, and remove it."
            )
        return path

    @contextlib.contextmanager
    def _log(self) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > LOG_LIMIT_BYTES:
                self.log_file.rename(self._older_log_file)
        descriptor = self._open(self.log_file, os.O_WRONLY | os.O_APPEND)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, path: Path, flags: int) -> int:
        """Open a file. One that root creates belongs to the owner of the directory, who must use it too."""
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
    def _translated_errors(self, done: str) -> Iterator[None]:
        """Translate errors of the operating system into a sentence about this server."""
        try:
            yield
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedServerError(
                f"the embedded PostgreSQL in {self.directory} could not be {done}: {error}. "
                "Check who owns that directory, or name another one."
            ) from error
