"""Writes docs/reliability.md from the verdicts of a full run."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from howdah import __version__
from howdah.chaos.checker import PROMISES
from howdah.chaos.report import median

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from howdah.chaos.run import Verdict
    from howdah.chaos.scenario import Scenario

HEAD = """\
# Reliability

`make chaos` generates this page. It runs real workers and producers against real PostgreSQL servers, injects every
fault listed below, and then checks, job by job and from a ledger outside the database, whether every promise was kept.
Do not edit this page by hand.

The run with seed {seed} took {minutes:.0f} minutes: {jobs:,} acknowledged jobs with {runs:,} executions, and
{hits:,} hits, as defined below. Howdah {version}, PostgreSQL {postgresql}, Python {python}.

{verdict}

## Faults and promises

The columns P1 to P9 count the violations of each promise. A *hit* is a fault that struck while a job was in flight or an
enqueue was unanswered.

"""


def page(
    done: Sequence[tuple[Scenario, Verdict]],
    *,
    seed: int,
    seconds: float,
    postgresql: str,
    short: Sequence[str] = (),
    missing: Mapping[str, str] | None = None,
) -> str:
    """The page. `short` lists the minimum counts that the run did not reach, `missing` the scenarios that could not
    run, with the reasons."""
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
        verdict="**Every promise was kept: no job was lost, and no job ended twice.**"
        if not broken
        else f"**{broken} findings: see below.**",
    )
    if short:
        text = text.replace("\n## ", f"\nThis was not a full run: {'; '.join(short)}.\n\n## ", 1)
    text += _row("fault", "jobs", "hits", *PROMISES) + _rule(2 + len(PROMISES))
    for scenario, verdict in done:
        counts = [str(verdict.broken().get(promise, 0)) for promise in PROMISES]
        hits = f"{sum(verdict.hits.values()):,}"
        text += _row(scenario.about or scenario.name, f"{verdict.acknowledged:,}", hits, *counts)
    if missing:
        text += "\nNot run:\n\n"
        text += "".join(f"- {name}: {reason}\n" for name, reason in missing.items())
    text += "\n| | promise |\n|---|---|\n"
    text += "".join(f"| {promise} | {what} |\n" for promise, what in PROMISES.items())
    text += "\n## Recovery time\n\n"
    text += (
        "For a killed or paused worker: the time until each of its claimed jobs was claimed again. This includes the "
        "lease, which is two seconds here and thirty seconds by default. For faults of the server and of "
        "connections: the time from the end of the fault until the next acknowledgement.\n\n"
    )
    text += _row("fault", "hits", "measurements", "p50", "max") + _rule(4)
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
    """The ids of acknowledged jobs that were only on the lost primary."""
    lost = sorted({f.job for verdict in verdicts for f in verdict.excused if f.promise == "P1"})
    if not lost:
        return ""
    return (
        "\n## Jobs lost by an asynchronous standby\n\nReplication to the standby was delayed on purpose before the "
        "failover. The missing rows were found on the disk of the dead primary. The checker reported the "
        f"acknowledged jobs among them, {len(lost):,} in all. A synchronous standby lost no job.\n\n"
        + "".join(f"- `{job}`\n" for job in lost)
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _rule(numbers: int) -> str:
    return "|---|" + "---:|" * numbers + "\n"
