"""The chapter on growth, from the results alone: tables, and a plot of claim time and of throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import growth
from bench.plots import lines

if TYPE_CHECKING:
    from bench.results import Results, Summary

TITLES = {"howdah": "Howdah", "pgqueuer": "PgQueuer", "graphile": "Graphile Worker"}
CLAIM_BAR, HELD_BAR, IDLE_BAR = 2.0, 0.8, 5.0


def chapter(results: Results) -> str:
    """The chapter as Markdown; empty if growth was not measured."""
    parts = [
        _pending(results),
        _types(results),
        _held(results),
        _processes(results),
        _idle(results),
    ]
    found = [part for part in parts if part]
    return (
        "\n\n".join(["## Growth of the queue", _preface(results), *found]) + "\n" if found else ""
    )


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
            "Claim time by number of pending jobs", "ms for a claim of 10 jobs", labels, claims
        )
    labels, workloads = _names("held", growth.DEAD)
    held = {
        title: [_median(results, w, peer, "jobs_per_second") for w in workloads]
        for peer, title in TITLES.items()
        if any(results.values(w, peer, "jobs_per_second") for w in workloads)
    }
    if held:
        drawn["growth-held.svg"] = lines(
            "Throughput by dead index entries behind an open transaction",
            "jobs per second",
            labels,
            held,
        )
    return drawn


def _preface(results: Results) -> str:
    facts = results.content.get("growth", {})
    machine, scale = facts.get("machine", {}), facts.get("scale", 1.0)
    text = (
        f"Measured on {machine.get('measured_on', '?')}, {machine.get('cores', '?')} cores, "
        f"`fsync=on`, load before the run {machine.get('load_before', '?')}. A claim takes "
        "10 jobs. Claim times are those of the statement; durable times include the commit. Figures are medians of "
        "the rounds, with the lowest and the highest value in brackets. Every round of Howdah's worker asserts a "
        "history row for every handler that ran, the server's settings of `fsync` and `synchronous_commit`, and "
        "the rejection of a stale acknowledgement."
    )
    if scale != 1.0:
        text += f" **All numbers of jobs are {scale:g} times those in the tables.**"
    return text


# ── tables ────────────────────────────────────────────────────────────────────────────────────────

CLAIM_COLUMNS = (
    ("jobs/s", "jobs_per_second", 0),
    ("claim p50, ms", "claim_p50_ms", 2),
    ("claim p99, ms", "claim_p99_ms", 2),
    ("durable p99, ms", "durable_claim_p99_ms", 2),
    ("pages per claim", "claim_pages", 0),
    ("server CPU, µs/job", "server_cpu_us", 0),
)


def _pending(results: Results) -> str:
    labels, workloads = _names("pending", growth.PENDING)
    rows = list(zip(labels, workloads, strict=True))
    rows.append(("10k, repeated", "growth-full-base"))
    rows.append(("5M, 1M scheduled, 1M blocked, 10M finished", "growth-full"))
    table = _table(results, "pending jobs", rows, CLAIM_COLUMNS)
    if not table:
        return ""
    text = [
        "### Pending jobs",
        table,
        "![Claim time by number of pending jobs](plots/growth-claims.svg)",
    ]
    ratio = _ratio(results, "growth-full", "growth-full-base", "claim_p99_ms")
    if ratio is not None:
        text.append(
            f'Claim p99 of the last row divided by that of "10k, repeated", in the same rounds: **{ratio:.2f} ×** '
            f"(goal: at most {CLAIM_BAR:g})."
        )
    return "\n\n".join(text)


def _types(results: Results) -> str:
    labels, workloads = _names("types", growth.TYPES)
    rows = list(zip(labels, workloads, strict=True))
    table = _table(results, "job types", rows, CLAIM_COLUMNS)
    if not table:
        return ""
    return f"### Job types\n\n100k pending jobs of the given number of job types.\n\n{table}"


def _held(results: Results) -> str:
    labels, workloads = _names("held", growth.DEAD)
    lines_ = []
    for peer, title in TITLES.items():
        rows = []
        for label, workload in zip(labels, workloads, strict=True):
            rows.append((f"{title}, control", f"{workload}-free"))
            rows.append((f"{title}, {label}", workload))
        columns = CLAIM_COLUMNS if peer == "howdah" else (CLAIM_COLUMNS[0], CLAIM_COLUMNS[-1])
        lines_.append(_table(results, "dead entries", rows, columns, peer))
    if not any(lines_):
        return ""
    text = [
        "### Long-running transactions",
        "A transaction stays open while jobs are enqueued and completed, so vacuum cannot remove their dead "
        "entries from the index that claims use. The entries are counted in the pages of the index. Rounds "
        "alternate with control rounds: an identical queue, in a database without an open transaction.",
        *filter(None, lines_),
        "![Throughput by dead index entries](plots/growth-held.svg)",
    ]
    last = f"growth-held-{growth.DEAD[-1]}"
    for peer, title in TITLES.items():
        ratio = _ratio(results, last, f"{last}-free", "jobs_per_second", peer)
        if ratio is not None:
            bar = f" (goal: at least {HELD_BAR:g})" if peer == "howdah" else ""
            many = _short(growth.DEAD[-1])
            text.append(
                f"{title} with {many} dead entries divided by its control: **{ratio:.2f} ×**{bar}."
            )
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
        f"### Idle workers\n\n{growth.IDLE} idle workers use {_cell(load, 1)} % of one core "
        f"of the server (goal: under {IDLE_BAR:g} %), in {rate:.0f} transactions per second."
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
