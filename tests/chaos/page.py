"""Writes docs/reliability.md from what a full run has shown."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from howdah import __version__
from howdah.chaos.checker import PROMISES
from howdah.chaos.report import median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from howdah.chaos.run import Verdict
    from howdah.chaos.scenario import Scenario

HEAD = """\
# Reliability

This page is written by `make chaos`, which runs real workers and producers against real PostgreSQL servers, breaks
them in every way listed below, and then decides from a ledger outside the database, job by job, whether every
promise was kept. Do not edit it by hand.

The run with seed {seed} took {minutes:.0f} minutes: {jobs:,} acknowledged jobs, run {runs:,} times; {hits:,} faults
that hit a job in the middle. Howdah {version}, PostgreSQL {postgresql}, Python {python}.

{verdict}

## Faults and promises

How often each promise was found broken.

"""


def page(
    done: Sequence[tuple[Scenario, Verdict]],
    *,
    seed: int,
    seconds: float,
    postgresql: str,
    short: Sequence[str] = (),
) -> str:
    """The page. `short` is what the run did too little of."""
    verdicts = [verdict for _, verdict in done]
    jobs = sum(verdict.acknowledged for verdict in verdicts)
    broken = sum(len(verdict.findings) + len(verdict.notes) for verdict in verdicts)
    text = HEAD.format(
        seed=seed,
        minutes=seconds / 60,
        jobs=jobs,
        runs=sum(verdict.executions for verdict in verdicts),
        hits=sum(sum(verdict.hits.values()) for verdict in verdicts),
        version=__version__,
        postgresql=postgresql,
        python=platform.python_version(),
        verdict="**Every promise was kept: nothing was lost, and nothing ended twice.**"
        if not broken
        else f"**{broken} findings: see below.**",
    )
    if short:
        text = text.replace(
            "\n## ", f"\nToo little to be a full run: {'; '.join(short)}.\n\n## ", 1
        )
    text += _row("fault", "jobs", "hits", *PROMISES) + _rule(2 + len(PROMISES))
    for scenario, verdict in done:
        counts = [str(verdict.broken().get(promise, 0)) for promise in PROMISES]
        hits = f"{sum(verdict.hits.values()):,}"
        text += _row(scenario.about or scenario.name, f"{verdict.acknowledged:,}", hits, *counts)
    text += "\n| | promise |\n|---|---|\n"
    text += "".join(f"| {promise} | {what} |\n" for promise, what in PROMISES.items())
    text += "\n## How soon work resumed\n\n"
    text += (
        "For a worker that was killed or paused: until each job that it had was claimed again; its lease, of two "
        "seconds here and thirty by default, is a part of that. For faults of the server and of connections: from "
        "their end until the next acknowledgement.\n\n"
    )
    text += _row("fault", "hits", "times", "p50", "max") + _rule(4)
    hits: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, count in verdict.hits.items():
            hits[name] = hits.get(name, 0) + count
        for name, seconds_ in verdict.recoveries.items():
            times.setdefault(name, []).extend(seconds_)
    for name in sorted(hits):
        measured = sorted(times.get(name, []))
        p50, most = (f"{median(measured):.2f} s", f"{measured[-1]:.2f} s") if measured else ("", "")
        text += _row(name, f"{hits[name]:,}", f"{len(measured):,}", p50, most)
    return text + _losses(verdicts)


def _losses(verdicts: Sequence[Verdict]) -> str:
    """Acknowledged jobs that only a lost primary knew, by id."""
    lost = sorted({f.job for verdict in verdicts for f in verdict.excused if f.promise == "P1"})
    if not lost:
        return ""
    return (
        "\n## What an asynchronous standby lost\n\nThe standby was held back on purpose before it took over. What "
        "it lacked was found on the dead primary's disk, and these are the acknowledged jobs among it, "
        f"{len(lost):,} in all, named by the checker. A synchronous standby lost none.\n\n"
        + "".join(f"- `{job}`\n" for job in lost)
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _rule(numbers: int) -> str:
    return "|---|" + "---:|" * numbers + "\n"
