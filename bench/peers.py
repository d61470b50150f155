"""The peers: the environment of each, the server that it needs, and the number of jobs in its rounds. Slow peers get
fewer jobs, which saves time and does not change their rates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.adapter_process import HOME, ROOT


class NotInstalled(Exception):
    """A peer cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Peer:
    """One peer, and the optional workloads that it takes part in."""

    name: str
    title: str
    service: Literal["postgres", "redis"]
    requirements: tuple[str, ...] = ()
    """The packages of its own environment. Empty: it runs in the environment of the benchmarks."""
    python: tuple[int, int] = (3, 11)
    is_node: bool = False
    is_ceiling: bool = False
    drain: int = 20_000
    """Jobs per round of no-op jobs."""
    single: int = 1_500
    """Jobs per round of single enqueues, one after the other."""
    counted: str = ""
    """The SQL query or Redis command that counts the jobs in its queue. Howdah's jobs are counted as they run."""
    takes: frozenset[str] = field(default_factory=frozenset)
    """The optional workloads that it takes part in."""
    variants: tuple[dict[str, str], ...] = ()
    """Settings, as variables that its adapter reads. A run tries all of them and uses the best."""

    @property
    def is_ours(self) -> bool:
        """Whether it works on Howdah's tables and must prove what Howdah promises."""
        return self.name == "howdah" or self.is_ceiling

    @property
    def home(self) -> Path:
        return HOME / ("node" if self.is_node else f"venvs/{self.name}")

    def command(self) -> list[str]:
        """The command that starts its adapter."""
        if self.is_node:
            return [_require("node"), str(ROOT / "bench" / "adapters" / f"{self.name}.cjs")]
        python = str(self.home / "bin" / "python") if self.requirements else sys.executable
        return [python, "-m", f"bench.adapters.{self.name}"]

    @property
    def environment(self) -> dict[str, str]:
        return {"NODE_PATH": str(self.home / "node_modules")} if self.is_node else {}

    def install(self) -> str:
        """Create its environment unless it exists; returns the version of the peer."""
        if not self.requirements:
            return _version(sys.executable, "howdah")
        stamp = self.home / "installed"
        wanted = "\n".join(self.requirements)
        if not stamp.exists() or stamp.read_text() != wanted:
            (self._install_node if self.is_node else self._install_python)()
            stamp.write_text(wanted)
        return self.requirements[0].rpartition("@" if self.is_node else "=")[2]

    def _install_python(self) -> None:
        _run([_python(self.python), "-m", "venv", "--clear", str(self.home)])
        pip = [str(self.home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--disable-pip-version-check", *self.requirements])

    def _install_node(self) -> None:
        _require("node")
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "package.json").write_text('{"private": true}\n')
        options = ["--prefix", str(self.home), "--silent", "--no-audit", "--no-fund"]
        _run([_require("npm"), "install", *options, *self.requirements])


# Some optional workloads are only for the fastest peers, to limit the time of a run.
ALL = frozenset({"drain-io", "steady"})
ON_POSTGRES = ALL | {"pickup-commit", "enqueue-transaction"}
FAST_PEERS = frozenset({"pickup-loaded", "enqueue-16p"})
MAIN = ON_POSTGRES | FAST_PEERS | {"pickup-loaded-commit", "payload"}
EVERYTHING = MAIN | {"drain-thread", "drain-process", "progress"}
UVLOOP = "uvloop==0.23.0"
PSYCOPG = "psycopg[binary]==3.3.8"
PEERS = [
    Peer("howdah", "Howdah", "postgres", drain=60_000, single=3_000, takes=EVERYTHING),
    Peer("bare", "bare asyncpg loop", "postgres", is_ceiling=True, drain=60_000),
    Peer("pipelined", "bare loop, pipelined", "postgres", is_ceiling=True, drain=60_000),
    Peer("pgbench", "pgbench, same statements", "postgres", is_ceiling=True, drain=60_000),
    Peer(
        "pgqueuer",
        "PgQueuer",
        "postgres",
        ("pgqueuer[asyncpg]==1.6.0", UVLOOP),
        drain=30_000,
        counted="SELECT count(*) FROM pgqueuer",
        takes=MAIN | {"drain-thread"},
    ),
    Peer(
        "graphile",
        "Graphile Worker",
        "postgres",
        ("graphile-worker@0.18.0", "pg@8"),
        is_node=True,
        drain=60_000,
        counted="SELECT count(*) FROM graphile_worker.jobs",
        variants=({"BENCH_CONCURRENCY": "24"}, {"BENCH_CONCURRENCY": "100"}),
        takes=MAIN,
    ),
    Peer(
        "oban",
        "oban-py",
        "postgres",
        ("oban==0.7.0", PSYCOPG, UVLOOP),
        python=(3, 12),
        drain=8_000,
        counted="SELECT count(*) FROM oban_jobs",
        takes=ON_POSTGRES,
    ),
    Peer(
        "procrastinate",
        "procrastinate",
        "postgres",
        ("procrastinate==3.10.0", PSYCOPG, UVLOOP),
        drain=2_000,
        counted="SELECT count(*) FROM procrastinate_jobs",
        takes=ON_POSTGRES | {"drain-thread"},
    ),
    Peer(
        "saq",
        "SAQ",
        "redis",
        ("saq[redis,hiredis]==0.26.4", "typing-extensions", UVLOOP),
        drain=6_000,
        counted="LLEN saq:default:queued",
        takes=ALL | FAST_PEERS | {"drain-thread"},
    ),
    Peer(
        "celery",
        "Celery",
        "redis",
        ("celery[redis]==5.7.0",),
        drain=2_500,
        single=1_000,
        counted="LLEN celery",
        variants=(
            {"BENCH_POOL": "prefork"},
            {"BENCH_POOL": "threads"},
            {"BENCH_POOL": "threads", "BENCH_THREADS": "10"},
            {"BENCH_POOL": "solo"},
        ),
        takes=ALL | {"drain-thread", "drain-process"},
    ),
]


def find(names: list[str] | None) -> list[Peer]:
    """The peers of these names, or all."""
    known = {peer.name: peer for peer in PEERS}
    unknown = set(names or ()) - set(known)
    if unknown:
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [known[name] for name in names] if names else PEERS


def _python(oldest: tuple[int, int]) -> str:
    """This Python if it is new enough, otherwise the newest one in the path or in pyenv."""
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for minor in range(20, oldest[1] - 1, -1):
        name = f"python3.{minor}"
        found = [
            shutil.which(name),
            *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")),
        ]
        for path in filter(None, found):
            probe = subprocess.run(
                [str(path), "-c", "import venv"], capture_output=True, check=False
            )
            if probe.returncode == 0:
                return str(path)
    raise NotInstalled(f"it needs Python {oldest[0]}.{oldest[1]} or newer, which is not installed")


def _require(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise NotInstalled(f"{program} is not installed")
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise NotInstalled(f"{Path(command[0]).name}: {' '.join(last)}")


def _version(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
