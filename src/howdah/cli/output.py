"""Formats output: tables that fit the terminal, readable times, and one JSON object per line for programs.

Text from the database may come from anyone, so it is cleaned (`encoding/visible_text.py`). Piped output is neither
cut nor colored."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from howdah.encoding.visible_text import clean
from howdah.insight.durations import format_duration
from howdah.model import Job, Status

PIPED_WIDTH = 100_000
MIN_WIDTH = 8  # characters of a column that was narrowed
GAP = 2

STYLES = {
    "pending": "yellow",
    "claimed": "cyan",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "cancelled": "magenta",
    "ok": "green",
    "warning": "yellow",
    "problem": "bold red",
    "unknown": "dim",
    "enqueued": "yellow",
    "error": "red",
    "event": "blue",
}
_SIGNS = {
    "pending": ("○", "o"),
    "claimed": ("▷", ">"),
    "running": ("▶", ">"),
    "completed": ("✓", "+"),
    "failed": ("✗", "x"),
    "cancelled": ("⊘", "-"),
    "ok": ("✓", "+"),
    "warning": ("!", "!"),
    "problem": ("✗", "x"),
    "unknown": ("?", "?"),
    "enqueued": ("○", "o"),
    "error": ("↻", "!"),
    "event": ("•", "*"),
    "more": ("…", "..."),
}


def one_line(text: object) -> str:
    """The first line of a text, cleaned, with an ellipsis if there are more lines."""
    lines = str(text).strip().splitlines()
    return clean(lines[0]) + (" …" if len(lines) > 1 else "") if lines else ""


def compact(value: Any) -> str:
    """A JSON value on one line."""
    return clean(json.dumps(value, ensure_ascii=False, default=str))


def relative(at: datetime | None, now: datetime) -> str:
    """ "3 s ago", "in 5 min"."""
    if at is None:
        return ""
    whole = timedelta(seconds=round(abs((now - at).total_seconds())))
    if not whole:
        return "now"
    # Whole seconds: on a screen that refreshes, tenths would flicker.
    text = f"{whole.seconds} s" if whole < timedelta(seconds=60) else format_duration(whole)
    return f"{text} ago" if at < now else f"in {text}"


def clock(at: datetime, now: datetime | None = None) -> str:
    """The local time, with the date unless it is today."""
    local = at.astimezone()
    if now is None or local.date() != now.astimezone().date():
        return f"{local:%Y-%m-%d %H:%M:%S}"
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03}"


def plain(value: Any) -> Any:
    """A value as JSON types: times are ISO 8601 in UTC, durations are seconds."""
    match value:
        case Job():
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            fields.pop("lease_id")  # the fence is for the worker that claimed the job
            return plain(fields)
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case UUID() | date():
            return str(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table. If the table is too wide, columns with the highest `drop` are left out first; 0
    is never left out. A `flexible` column may be cut down to `min_width`."""

    title: str
    drop: int = 0
    flexible: bool = False
    min_width: int = MIN_WIDTH
    right: bool = False


class Output:
    """Standard output for results, standard error for notes."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = _console(sys.stdout, stderr=False)
        self.aside = _console(sys.stderr, stderr=True)
        self.is_terminal = sys.stdout.isatty() and not as_json
        self.has_unicode = self.console.encoding.lower().startswith("utf")

    @property
    def width(self) -> int:
        """The characters that fit on a line; unlimited if piped."""
        return self.console.width if self.is_terminal else PIPED_WIDTH

    def sign(self, name: str) -> str:
        """The one-character sign of a status, level or occurrence."""
        return _SIGNS[name][0 if self.has_unicode else 1]

    def status(self, status: Status | str) -> Text:
        """A status in its color."""
        return Text(str(status), STYLES[str(status)])

    def json(self, value: Any) -> None:
        """Print one JSON object on one line."""
        sys.stdout.write(json.dumps(plain(value)) + "\n")
        sys.stdout.flush()

    def line(
        self, *parts: str | Text | tuple[str, str], indent: int = 0, lead: Text | None = None
    ) -> None:
        """Print a line of text after `lead`. A long line is wrapped, and indented by the width of `lead`."""
        lead = Text(" " * indent) + (lead or Text())
        body = Text.assemble(*parts)
        hang = cell_len(lead.plain)
        if not self.is_terminal or self.width - hang < MIN_WIDTH:
            return self.console.print(lead + body, soft_wrap=True)
        for number, each in enumerate(body.wrap(self.console, self.width - hang) or [Text()]):
            each.rstrip()
            start = Text(" " * hang) if number else lead
            self.console.print(start + each, soft_wrap=True)
        return None

    def block(self, text: str, indent: int = 2) -> None:
        """Print lines of text. Wrapped lines keep the indentation of their line."""
        for line in clean(text).rstrip().splitlines():
            bare = line.lstrip()
            self.line(bare, indent=indent + len(line) - len(bare))

    def note(self, text: str) -> None:
        """Print a note on standard error, unless the output is JSON."""
        if not self.as_json:
            self.aside.print(Text(clean(text), "dim"), soft_wrap=True)

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 0
    ) -> list[Text]:
        """The lines of a table that fits: empty columns are left out, then those with the highest `drop`."""
        cells = [[_cell(value) for value in row] for row in rows]
        wanted = [
            max((cell_len(row[n].plain) for row in cells), default=0) for n in range(len(columns))
        ]
        shown = [n for n in range(len(columns)) if wanted[n]]
        widths = {n: max(wanted[n], len(columns[n].title)) for n in shown}
        room = self.width - indent
        while _needed(columns, widths) > room and any(columns[n].drop for n in widths):
            del widths[max(widths, key=lambda n: columns[n].drop)]
        _narrow(columns, widths, room)
        titles = [Text(column.title.upper(), "dim") for column in columns]
        return [self._row(columns, widths, row, indent) for row in (titles, *cells)]

    def _row(
        self, columns: Sequence[Column], widths: dict[int, int], cells: Sequence[Text], indent: int
    ) -> Text:
        line = Text(" " * indent, no_wrap=True)
        for n, width in widths.items():
            cell = cells[n]
            if cell_len(cell.plain) > width:
                cut = set_cell_size(cell.plain, max(width - len(self.sign("more")), 0))
                cell = Text(cut.rstrip() + self.sign("more"), cell.style)
            space = " " * (width - cell_len(cell.plain))
            line.append_text(Text(space) + cell if columns[n].right else cell + Text(space))
            line.append(" " * GAP)
        line.rstrip()
        return line

    def print_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        """Print a table."""
        for line in self.table(columns, rows):
            self.console.print(line, soft_wrap=True)

    def fit(self, line: Text) -> Text:
        """Cut a line to the width of the terminal."""
        line.truncate(self.width, overflow="ellipsis" if self.has_unicode else "crop")
        return line

    def sparkline(self, counts: Sequence[int]) -> str:
        """Numbers as a row of bars."""
        bars = "▁▂▃▄▅▆▇█" if self.has_unicode else "_.:-=+*#"
        most = max(counts, default=0)
        steps = len(bars) - 1
        return "".join(bars[-(-count * steps // most)] if most else bars[0] for count in counts)

    def bar(self, percent: int, width: int = 10) -> str:
        """Percent as a bar."""
        full, empty = ("━", "─") if self.has_unicode else ("#", "-")
        filled = width * max(0, min(100, percent)) // 100
        return full * filled + empty * (width - filled)


def _cell(value: str | Text) -> Text:
    return value if isinstance(value, Text) else Text(one_line(value))


def _needed(columns: Sequence[Column], widths: dict[int, int]) -> int:
    narrowest = (
        min(width, columns[n].min_width) if columns[n].flexible else width
        for n, width in widths.items()
    )
    return sum(narrowest) + GAP * (len(widths) - 1)


def _narrow(columns: Sequence[Column], widths: dict[int, int], room: int) -> None:
    """Narrow the flexible columns, the widest first, until the row fits."""
    excess = sum(widths.values()) + GAP * (len(widths) - 1) - room
    while excess > 0:
        spare = {
            n: width - columns[n].min_width for n, width in widths.items() if columns[n].flexible
        }
        widest = max(spare, key=lambda n: spare[n], default=None)
        if widest is None or spare[widest] <= 0:
            return
        widths[widest] -= 1
        excess -= 1


def _console(stream: Any, *, stderr: bool) -> Console:
    if not (stream.encoding or "").lower().startswith("utf") and hasattr(stream, "reconfigure"):
        stream.reconfigure(
            errors="replace"
        )  # a character outside the encoding must not end the command
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)
