"""The chapter on growth, from the results alone: tables, and a plot for each of the two questions that a
growing queue is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import growth
from bench.plots import lines

if TYPE_CHECKING:
    from bench.results import Results, Summary

TITLES = {"howdah": "Howdah", "pgqueuer": "PgQueuer", "graphile": "Graphile Worker"}
CLAIM_BAR, HELD_BAR, IDLE_BAR = 2.0, 0.8, 5.0


def chapter(results: Results) -> str:
    """Everything about growth, as Markdown; empty if nothing of it was measured."""
    parts = [
        _pending(results),
        _types(results),
        _held(results),
        _processes(results),
        _idle(results),
    ]
    found = [part for part in parts if part]
    return "\n\n".join(["## As a queue grows", _preface(results), *found]) + "\n" if found else ""


def plots(results: Results) -> dict[str, str]:
    """The SVG files of the chapter, by their names."""
    drawn = {}
    labels, workloads = _names("pending", growth.PENDING)
    claims = {
        label: [_median(results, w, "howdah", figure) for w in workloads]
        for label, figure in (("p50", "claim_p50_ms"), ("p99", "claim_p99_ms"))
    }
    if any(value is not None for values in claims.values() for value in values):
        drawn["growth-claims.svg"] = lines(
            "A claim, by jobs that wait", "ms for a claim of 10 jobs", labels, claims
        )
    labels, workloads = _names("held", growth.DEAD)
    held = {
        title: [_median(results, w, peer, "jobs_per_second") for w in workloads]
        for peer, title in TITLES.items()
        if any(results.values(w, peer, "jobs_per_second") for w in workloads)
    }
    if held:
        drawn["growth-held.svg"] = lines(
            "By dead entries behind an open transaction", "jobs a second", labels, held
        )
    return drawn


def _preface(results: Results) -> str:
    facts = results.content.get("growth", {})
    machine, scale = facts.get("machine", {}), facts.get("scale", 1.0)
    text = (
        f"Measured on {machine.get('measured_on', '?')}, {machine.get('cores', '?')} cores, "
        f"`fsync=on`, load before the run {machine.get('load_before', '?')}. A claim takes "
        "10 jobs; its time is that of the statement, its durable time includes the commit. Medians of "
        "the rounds, lowest and highest in brackets. Every round of Howdah's worker asserts a row of history "
        "for every handler that ran, `fsync` and `synchronous_commit` as the server has them, and a stale "
        "acknowledgement refused."
    )
    if scale != 1.0:
        text += f" **All numbers of jobs are {scale:g} times what the tables say.**"
    return text


# ── tables ────────────────────────────────────────────────────────────────────────────────────────

CLAIM_COLUMNS = (
    ("jobs/s", "jobs_per_second", 0),
    ("claim p50, ms", "claim_p50_ms", 2),
    ("claim p99, ms", "claim_p99_ms", 2),
    ("durable p99, ms", "durable_claim_p99_ms", 2),
    ("pages a claim", "claim_pages", 0),
    ("server CPU a job, µs", "server_cpu_us", 0),
)


def _pending(results: Results) -> str:
    labels, workloads = _names("pending", growth.PENDING)
    rows = list(zip(labels, workloads, strict=True))
    rows.append(("10k again", "growth-full-base"))
    rows.append(("5M, 1M scheduled, 1M blocked, 10M finished", "growth-full"))
    table = _table(results, "jobs that wait", rows, CLAIM_COLUMNS)
    if not table:
        return ""
    text = ["### Jobs that wait", table, "![claims](plots/growth-claims.svg)"]
    ratio = _ratio(results, "growth-full", "growth-full-base", "claim_p99_ms")
    if ratio is not None:
        text.append(
            f"Claim p99 with everything over that with 10k, in the same rounds: **{ratio:.2f} ×** "
            f"(bar: at most {CLAIM_BAR:g})."
        )
    return "\n\n".join(text)


def _types(results: Results) -> str:
    labels, workloads = _names("types", growth.TYPES)
    rows = list(zip(labels, workloads, strict=True))
    table = _table(results, "job types", rows, CLAIM_COLUMNS)
    if not table:
        return ""
    return f"### Job types\n\n100k jobs that wait, of so many types.\n\n{table}"


def _held(results: Results) -> str:
    labels, workloads = _names("held", growth.DEAD)
    lines_ = []
    for peer, title in TITLES.items():
        rows = []
        for label, workload in zip(labels, workloads, strict=True):
            rows.append((f"{title}, its twin meanwhile", f"{workload}-free"))
            rows.append((f"{title}, {label}", workload))
        columns = CLAIM_COLUMNS if peer == "howdah" else (CLAIM_COLUMNS[0], CLAIM_COLUMNS[-1])
        lines_.append(_table(results, "dead entries", rows, columns, peer))
    if not any(lines_):
        return ""
    text = [
        "### A transaction that somebody forgot",
        "It stays open while jobs come and go, so nothing that they leave in the index of claims can be "
        "removed. The entries are counted in its pages. Rounds alternate with rounds on a twin of the "
        "queue, in a database where no transaction is open.",
        *filter(None, lines_),
        "![dead entries](plots/growth-held.svg)",
    ]
    last = f"growth-held-{growth.DEAD[-1]}"
    for peer, title in TITLES.items():
        ratio = _ratio(results, last, f"{last}-free", "jobs_per_second", peer)
        if ratio is not None:
            bar = f" (bar: at least {HELD_BAR:g})" if peer == "howdah" else ""
            many = _short(growth.DEAD[-1])
            text.append(f"{title} with {many} over its twin: **{ratio:.2f} ×**{bar}.")
    return "\n\n".join(text)


def _processes(results: Results) -> str:
    labels, workloads = _names("processes", growth.PROCESSES)
    columns = (CLAIM_COLUMNS[0], CLAIM_COLUMNS[-1])
    rows = list(zip(labels, workloads, strict=True))
    table = _table(results, "worker processes", rows, columns)
    return f"### Worker processes\n\n{table}" if table else ""


def _idle(results: Results) -> str:
    workload = f"growth-idle-{growth.IDLE}"
    load = results.summary(workload, "howdah", "server_core_percent")
    if load is None:
        return ""
    rate = _median(results, workload, "howdah", "transactions_per_second")
    return (
        f"### Idle workers\n\n{growth.IDLE} workers with nothing to do take {_cell(load, 1)} % of one core "
        f"of the server (bar: under {IDLE_BAR:g} %), in {rate:.0f} transactions a second."
    )


def _table(
    results: Results,
    heading: str,
    rows: list[tuple[str, str]],
    columns: tuple[tuple[str, str, int], ...],
    peer: str = "howdah",
) -> str:
    found = []
    for label, workload in rows:
        cells = [
            _cell(results.summary(workload, peer, figure), digits) for _, figure, digits in columns
        ]
        if any(cells):
            found.append(f"| {label} | {' | '.join(cells)} |")
    if not found:
        return ""
    head = f"| {heading} | {' | '.join(title for title, _, _ in columns)} |"
    return "\n".join([head, "|---|" + "---:|" * len(columns), *found])


def _cell(found: Summary | None, digits: int) -> str:
    if found is None:
        return ""
    if found.rounds == 1:
        return f"{found.median:,.{digits}f}"
    low, high = f"{found.low:,.{digits}f}", f"{found.high:,.{digits}f}"
    return f"{found.median:,.{digits}f} [{low} … {high}]"


def _names(part: str, numbers: tuple[int, ...]) -> tuple[list[str], list[str]]:
    return [_short(n) for n in numbers], [f"growth-{part}-{n}" for n in numbers]


def _short(number: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if number >= size and number % size == 0 and number > 1000:
            return f"{number // size}{letter}"
    return f"{number:,}"


def _median(results: Results, workload: str, peer: str, figure: str) -> float | None:
    found = results.summary(workload, peer, figure)
    return None if found is None else found.median


def _ratio(
    results: Results, workload: str, base: str, figure: str, peer: str = "howdah"
) -> float | None:
    found = results.ratios(workload, peer, peer, figure, base)
    return None if found is None else found.median
