"""Parses what users type: durations, statuses, conditions, key=value. Each error is one sentence."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import click

from howdah.encoding.validation import check_option_text
from howdah.encoding.visible_text import clean
from howdah.errors import InvalidOption
from howdah.insight.durations import parse_duration
from howdah.insight.filters import parse_condition, parse_status, parse_value
from howdah.model import Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from click.shell_completion import CompletionItem

    from howdah.insight.filters import Condition

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic to type checkers only, before click 8.5


class Misuse(click.UsageError):
    """Wrong input: one sentence without the usage text, exit code 2."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error: {clean(self.format_message())}", file=file, err=file is None)


class Duration(ParamType):
    """ "30s", "5m", "2h", "7d"."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        try:
            return parse_duration(value)
        except InvalidOption as error:
            raise Misuse(str(error)) from None


class StatusName(ParamType):
    """One of the six statuses."""

    name = "status"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Status:
        try:
            return parse_status(value)
        except InvalidOption as error:
            raise Misuse(str(error)) from None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The statuses that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(str(each)) for each in Status if each.startswith(incomplete)]


class Where(ParamType):
    """A condition, see `howdah.insight.filters`."""

    name = "condition"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Condition:
        try:
            return parse_condition(value)
        except InvalidOption as error:
            raise Misuse(str(error)) from None


class Name(ParamType):
    """A text that PostgreSQL can store."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_option_text(value)
        except InvalidOption as error:
            raise Misuse(str(error)) from None


def parse_arguments(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of key=value words, parsed as JSON if possible; and each value as it was typed."""
    values: dict[str, Any] = {}
    words_of: dict[str, str] = {}
    for word in words:
        try:
            check_option_text(word)
        except InvalidOption as error:
            raise Misuse(str(error)) from None
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise Misuse(f'"{word}" is not an argument; write it as key=value.')
        if key in values:
            raise Misuse(f'"{key}" was given twice.')
        values[key], words_of[key] = parse_value(value), value
    return values, words_of


where_option = click.option(
    "--where",
    "conditions",
    type=Where(),
    multiple=True,
    metavar="CONDITION",
    help="Only jobs that meet this condition, as in status=failed, data.path=a.png, error~timeout, "
    "'age>2h'. May be repeated.",
)
