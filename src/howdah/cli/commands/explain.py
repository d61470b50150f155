"""`howdah explain`: why a job is not running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.text import Text

from howdah.cli.output import STYLES, one_line, relative
from howdah.cli.session import queue_command
from howdah.encoding.visible_text import clean
from howdah.errors import counted

if TYPE_CHECKING:
    from howdah.cli.output import Output
    from howdah.cli.session import Session


@click.command("explain", short_help="Explain why a job is not running.")
@click.argument("job_id", metavar="ID")
@queue_command
def explain_command(session: Session, output: Output, job_id: str) -> None:
    """Explain why a job is not running, which jobs run before it, and when it may start.

    ID may be the beginning or the end of an id that matches only one job.
    """
    found = session.explainer.explain(session.resolve(job_id))
    job = found.job
    if output.as_json:
        output.json(
            {
                "id": job.id,
                "job_type": job.job_type,
                "queue": job.queue,
                "status": job.status,
                "reasons": [{"code": each.code, "text": each.text} for each in found.reasons],
                "ahead": found.ahead,
                "starts_at": found.starts_at,
            }
        )
        return
    now = session.statistics.now()
    output.line((f"{output.sign(job.status)} {job.status}", f"bold {STYLES[job.status]}"), "  ",
                (one_line(job.job_type), "bold"), (f"  in {one_line(job.queue)}", "dim"))  # fmt: skip
    output.line(str(job.id))
    for reason in found.reasons:
        output.line(clean(reason.text), lead=Text(f"  {output.sign('event')} "))
    codes = {reason.code for reason in found.reasons}
    if found.ahead and "behind" not in codes:
        output.line(
            f"{output.sign('event')} {counted(found.ahead, 'job')} of its queue run before it",
            indent=2,
        )
    if found.starts_at is not None:
        output.line(f"It may start {relative(found.starts_at, now)}.", indent=2)
