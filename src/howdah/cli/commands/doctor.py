"""`howdah doctor`: finds what makes a queue slow, stuck or unsafe."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.text import Text

from howdah.cli.options import connect, database_options, json_lines_option, resolve_url
from howdah.cli.output import STYLES, Output
from howdah.cli.values import Misuse
from howdah.encoding.visible_text import clean
from howdah.errors import InvalidOption, counted
from howdah.insight.doctor import Doctor
from howdah.protocol.schema_name import quote_schema


@click.command("doctor", short_help="Find what makes a queue slow, stuck or unsafe.")
@database_options
@json_lines_option
def doctor_command(database: str | None, schema: str, as_json: bool) -> None:
    """Find what makes a queue slow, stuck or unsafe, and say what to do.

    The exit code is 1 if there is a problem; a warning does not count.
    """
    try:
        quote_schema(schema)
    except InvalidOption as error:
        raise Misuse(str(error)) from None
    output = Output(as_json=as_json)
    levels = []
    with connect(resolve_url(database)) as conn:
        for finding in Doctor(conn, schema).examine():
            levels.append(finding.level)
            if as_json:
                output.json(asdict(finding))
                continue
            lead = Text(f"{output.sign(finding.level)} ", STYLES[finding.level])
            lead.append(f"{finding.check:<13}  ", "default bold")
            output.line(" ".join(clean(line) for line in finding.text.splitlines()), lead=lead)
            if finding.advice:
                output.line(clean(finding.advice), indent=17)
    problems, warnings = levels.count("problem"), levels.count("warning")
    if not as_json:
        summary = (
            f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
            if problems or warnings
            else "No problems found"
        )
        worst = "problem" if problems else "warning" if warnings else "ok"
        output.line("")
        output.line((f"{summary}.", STYLES[worst]))
    click.get_current_context().exit(1 if problems else 0)
