"""Writes docs/benchmarks.md and its plots from bench/results.json. No figure is written by hand.

`python -m bench.report` rewrites them without measuring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import auto_tuning, goals, growth_report, peers, plots
from bench.adapter_process import ROOT
from bench.goals import CEILINGS, TITLES
from bench.results import Results

if TYPE_CHECKING:
    from pathlib import Path

    from bench.results import Summary

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the name of its figure, and the number of decimals."""

    heading: str
    figure: str
    digits: int = 0


JOBS = Column("jobs/s", "jobs_per_second")
CPU = (
    Column("client CPU, µs/job", "client_cpu_us"),
    Column("server CPU, µs/job", "server_cpu_us"),
)
WAL = Column("WAL, bytes/job", "wal_bytes_per_job")
CALL = tuple(
    Column(f"{p}, ms", f"call_{n}_ms", 2)
    for p, n in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"))
)
COMMIT = tuple(Column(c.heading, c.figure.replace("call", "commit"), 2) for c in CALL)
# workload: (title, description, columns, the figure of the plot or "")
SECTIONS: dict[str, tuple[str, str, tuple[Column, ...], str]] = {
    "drain-async": (
        "No-op jobs",
        "The queue is filled, then one worker process empties it. The handlers are asynchronous and only count. "
        "The two bare loops and pgbench are upper bounds: they run Howdah's statements without its worker.",
        (JOBS, *CPU, WAL),
        "jobs_per_second",
    ),
    "drain-thread": (
        "No-op jobs in threads",
        "The same with `def` handlers, which run in threads of the worker. PgQueuer supports coroutines only: its "
        "handlers await `asyncio.to_thread`, as PgQueuer recommends.",
        (JOBS, *CPU),
        "",
    ),
    "drain-io": (
        "I/O-bound jobs",
        "Each handler waits for 1 ms, as for a reply from the network.",
        (JOBS, *CPU),
        "",
    ),
    "drain-process": (
        "CPU-bound jobs",
        "Each handler uses 1 ms of CPU, in child processes of the worker: Howdah's process executor and Celery's "
        "`prefork` pool. The other peers have no equivalent.",
        (JOBS, *CPU),
        "",
    ),
    "pickup-idle": (
        "Pick-up latency, idle worker",
        "From the enqueue call in one process to the start of the handler in another process, on an idle worker.",
        CALL,
        "call_p50_ms",
    ),
    "pickup-commit": (
        "Pick-up latency from COMMIT",
        "The job is enqueued in a transaction of the caller. The time starts just before COMMIT is sent.",
        COMMIT,
        "commit_p50_ms",
    ),
    "pickup-loaded": (
        "Pick-up latency at half load",
        "From the enqueue call, while other jobs arrive at half the rate that this peer sustained in the steady "
        "state.",
        (*CALL, Column("other jobs/s", "load_jobs_per_second")),
        "call_p50_ms",
    ),
    "pickup-loaded-commit": (
        "Pick-up latency from COMMIT at half load",
        "The same, but the job is enqueued in a transaction of the caller. The time starts just before COMMIT is "
        "sent.",
        (*COMMIT, Column("other jobs/s", "load_jobs_per_second")),
        "",
    ),
    "enqueue-bulk": (
        "Bulk enqueue",
        "Batches of 1,000 if the peer has a bulk call; otherwise its fastest method.",
        (JOBS, *CPU, WAL),
        "jobs_per_second",
    ),
    "enqueue-1": ("Single enqueues, one caller", "One after another.", (JOBS, *CPU, WAL), ""),
    "enqueue-64": (
        "Single enqueues, 64 concurrent callers",
        "All callers are in one process. Each waits until its own job is durable.",
        (JOBS, *CPU, WAL),
        "jobs_per_second",
    ),
    "enqueue-16p": ("Single enqueues, 16 processes", "One caller per process.", (JOBS, WAL), ""),
    "enqueue-transaction": (
        "Enqueues in a transaction",
        "One caller: BEGIN, enqueue, COMMIT.",
        (JOBS, WAL),
        "",
    ),
    "steady": (
        "Steady state",
        "One process enqueues and another runs the jobs, for the given number of seconds, with about 5,000 pending "
        "jobs, or fewer for slow peers. Sizes are measured at the end, when all jobs are finished. Howdah, "
        "PgQueuer, oban-py and procrastinate keep a history of jobs; Graphile Worker does not.",
        (
            JOBS,
            Column("seconds", "seconds"),
            Column("server CPU, µs/job", "server_cpu_us"),
            Column("worker CPU, µs/job", "worker_cpu_us"),
            Column("producer CPU, µs/job", "producer_cpu_us"),
            WAL,
            Column("total jobs", "jobs"),
            Column("tables, bytes/job", "table_bytes_per_job"),
            Column("indexes, bytes/job", "index_bytes_per_job"),
        ),
        "",
    ),
    "progress": (
        "Progress reports",
        "Jobs that report their progress 100 times each.",
        (Column("reports/s", "reports_per_second"), *CPU),
        "",
    ),
}
PAYLOADS = (100, 1000, 5000)


def write(results: Results) -> None:
    """Write the page and the plots."""
    PLOTS.mkdir(exist_ok=True)
    for old in PLOTS.glob("*.svg"):
        old.unlink()
    parts = [
        "# Benchmarks",
        "Howdah and its peers do the same work on the same machine in one run. `make bench` generates this page from "
        "`bench/results.json`, which contains every round. Do not edit it by hand.",
        _method(results.content),
        _machine(results.content),
        goals.chapter(results),
        *(_section(results, name) for name in SECTIONS),
        _payloads(results),
        _growth(results),
        _settings(results),
    ]
    PAGE.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")


def _method(content: dict[str, Any]) -> str:
    twice = sorted({TITLES[r["peer"]] for r in content["rounds"] if r["figures"].get("repeated")})
    again = f" In this run a few jobs of {' and '.join(twice)} ran more than once." if twice else ""
    return (
        "- Rounds are interleaved: every peer runs once, then every peer runs the next round. Figures are medians of "
        "the rounds, with the lowest and the highest value in brackets. Ratios are computed per round: Howdah's "
        "figure divided by the peer's.\n"
        "- Every handler runs and is counted. A job that never ran is an error. A job that ran more than once is an error for "
        f"Howdah and is reported for peers.{again} Where jobs are only enqueued, the jobs of peers are counted in "
        "their queues.\n"
        "- Rates are measured from the first start of a handler to the last. Process startup, the first claim and "
        "the last acknowledgement are not included, which favors peers with large batches.\n"
        f"- {_checked(content)}\n"
        "- Client and server share the cores of one machine. Compare figures within a run, not between "
        "machines.\n"
        "- Each peer is configured as its documentation recommends for short jobs. Where several values of a setting "
        "were tried, they are listed below. A slow peer takes part in fewer workloads."
        + _left_out(content)
    )


def _checked(content: dict[str, Any]) -> str:
    """How many rounds contain the evidence of their assertions."""
    ours = {"howdah", *CEILINGS}
    rounds = [
        r
        for r in content["rounds"]
        if r["peer"] in ours and not r["workload"].startswith("growth-")
    ]
    proven = [r for r in rounds if "refused" in r["facts"].get("stale_acknowledgement", "")]
    return (
        "Rounds of Howdah and of the upper bounds assert four things: `fsync=on`; `synchronous_commit=on` for "
        "enqueues and for acknowledgements, as observed by a trigger on the tables for jobs that took the same "
        "path as the measured jobs; a history row for every job; and the rejection of a stale "
        f"acknowledgement. The evidence is stored with the round, in {len(proven)} of {len(rounds)} rounds."
    )


def _left_out(content: dict[str, Any]) -> str:
    """Peers and workloads without a full set of figures, one line each."""
    lines = [f"\n- Not measured: {name}: {why}" for name, why in content.get("skipped", {}).items()]
    return "".join(lines)


def _machine(content: dict[str, Any]) -> str:
    machine = content.get("machine", {})
    postgres = dict(content.get("postgres", {}))
    redis = dict(content.get("redis", {}))
    rows = [
        (
            "Machine",
            f"{machine.get('cores')} cores, {machine.get('processor')}, {machine.get('memory_gib')} GiB",
        ),
        ("System", f"{machine.get('system')}, Python {machine.get('python')}"),
        (
            "Measured on",
            f"{machine.get('measured_on')}, load before the run {machine.get('load_before')}",
        ),
        ("PostgreSQL", f"{postgres.pop('version', '?')}: {_options(postgres)}"),
    ]
    if redis:
        rows.append(("Redis", f"{redis.pop('version', '?')}: {_options(redis)}"))
    versions = content.get("versions", {})
    told = ", ".join(f"{TITLES[n]} {v}" for n, v in versions.items() if n not in CEILINGS)
    rows.append(("Versions", told))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _options(settings: dict[str, str]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in settings.items())


# ── tables and plots ──────────────────────────────────────────────────────────────────────────────


def _section(results: Results, workload: str) -> str:
    title, text, columns, plot = SECTIONS[workload]
    entries = _ranked(results, workload, columns[0].figure)
    if not entries:
        return ""
    parts = [f"## {title}", text]
    if plot:
        name = f"{workload}.svg"
        unit = "p50 in ms, lower is better" if plot.endswith("_ms") else "jobs per second"
        unit += "; median of the rounds, with lowest and highest"
        (PLOTS / name).write_text(plots.bars(title, unit, _chart(results, workload, plot, entries)))
        parts.append(f"![{title}](plots/{name})")
    head = " | ".join(["", *(column.heading for column in columns), "Howdah ÷ this"])
    lines = [f"|{head} |", "|---" + "|---:" * (len(columns) + 1) + "|"]
    for peer in entries:
        cells = [_cell(results.summary(workload, peer, c.figure), c.digits) for c in columns]
        over = _over(results, workload, peer, columns[0].figure)
        lines.append(f"| {TITLES[peer]} | {' | '.join([*cells, over])} |")
    return "\n\n".join([*parts, "\n".join(lines)])


def _ranked(results: Results, workload: str, figure: str) -> list[str]:
    found = {
        p: s.median for p in results.peers(workload) if (s := results.summary(workload, p, figure))
    }
    return sorted(found, key=lambda peer: found[peer], reverse=not figure.endswith("_ms"))


def _chart(results: Results, workload: str, figure: str, entries: list[str]) -> list[plots.Bar]:
    drawn = []
    for peer in sorted(entries, key=lambda peer: peer in CEILINGS):  # upper bounds below the peers
        found = results.summary(workload, peer, figure)
        if found is not None:
            colour = plots.THEIRS
            if peer == "howdah":
                colour = plots.OURS
            elif peer in CEILINGS:
                colour = plots.CEILING
            drawn.append(plots.Bar(TITLES[peer], found.median, found.low, found.high, colour))
    return drawn


def _cell(found: Summary | None, digits: int) -> str:
    if found is None:
        return "–"
    if found.rounds == 1:
        return f"{found.median:,.{digits}f}"
    return f"{found.median:,.{digits}f} [{found.low:,.{digits}f} … {found.high:,.{digits}f}]"


def _payloads(results: Results) -> str:
    columns = (
        JOBS,
        Column("bulk enqueue, jobs/s", "enqueue_jobs_per_second"),
        *CPU,
        WAL,
        Column("WAL of the enqueue, bytes/job", "enqueue_wal_bytes_per_job"),
    )
    head = " | ".join(["", *(column.heading for column in columns), "Howdah ÷ this"])
    lines = [f"|{head} |", "|---" + "|---:" * (len(columns) + 1) + "|"]
    for size in PAYLOADS:
        workload = f"payload-{size}"
        for peer in results.peers(workload):
            cells = [_cell(results.summary(workload, peer, c.figure), c.digits) for c in columns]
            cells.append(_over(results, workload, peer, "jobs_per_second"))
            lines.append(f"| {size:,} bytes, {TITLES[peer]} | {' | '.join(cells)} |")
    text = (
        "No-op jobs with arguments of the given size, which PostgreSQL cannot compress. Every other workload has "
        "100 bytes."
    )
    return "\n\n".join(["## Payloads", text, "\n".join(lines)]) if len(lines) > 2 else ""


def _over(results: Results, workload: str, peer: str, figure: str) -> str:
    ratio = results.ratios(workload, "howdah", peer, figure)
    return f"{ratio.median:.2f} ×" if ratio and peer != "howdah" else ""


def _growth(results: Results) -> str:
    """The chapter on growth, if it was measured."""
    for name, drawing in growth_report.plots(results).items():
        (PLOTS / name).write_text(drawing)
    return growth_report.chapter(results)


def _settings(results: Results) -> str:
    """The configuration of each peer, from the header of its adapter, and what this run chose."""
    parts = ["## Configuration of each peer"]
    for peer in peers.PEERS:
        path = ROOT / "bench" / "adapters" / f"{peer.name}.{'cjs' if peer.is_node else 'py'}"
        parts.append(f"### {peer.title}\n\n{_header(path)}")
        chosen = [_choice(results, peer.name, workload) for workload in auto_tuning.TRIED_ON]
        parts += filter(None, chosen)
    return "\n\n".join(parts)


def _choice(results: Results, peer: str, workload: str) -> str:
    """The settings that were tried before the rounds of a workload."""
    facts = next(
        (
            r["facts"]
            for r in results.rounds
            if (r["workload"], r["peer"]) == (workload, peer) and "tried" in r["facts"]
        ),
        None,
    )
    if facts is None:
        return ""
    unit = "ms" if workload.startswith("pickup") else "jobs/s"
    tried = "; ".join(
        f"{label}: {value:,.2f} {unit}" if value < 100 else f"{label}: {value:,.0f} {unit}"
        for label, value in facts["tried"].items()
    )
    return f"{SECTIONS[workload][0]}: measured with {facts['settings']}, the best of one trial each ({tried})."


def _header(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        return text.split('"""')[1].strip()
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return "\n".join(lines).strip()


if __name__ == "__main__":
    write(Results())
