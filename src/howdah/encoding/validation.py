"""Checks of what callers pass: texts, whole numbers, times and durations. An error names the parameter and
says what is wrong with its value."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from howdah.errors import InvalidJob, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.model import Seconds

T = TypeVar("T")

NAME_LIMIT = 200
LEASE_LIMIT = timedelta(days=30)
LAST_YEAR = 9998  # Python's last year is 9999, and converting the time zone may exceed it


def check_text(text: str, field: str) -> None:
    """Refuse a text that PostgreSQL cannot store: with a NUL character or a lone surrogate."""
    if "\x00" in text:
        raise InvalidJob(
            f"{field} holds a NUL character, which PostgreSQL cannot store.", field=field
        )
    if text.isascii():  # Python stores this flag, so the text is not scanned
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidJob(
            f"{field} holds a lone surrogate, which is not valid Unicode.", field=field
        ) from None


def check_option_text(text: str) -> str:
    """Refuse an option that the database cannot store. Text from a shell may be invalid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"{text!r:.100} is not valid Unicode.") from None
    if "\x00" in text:
        raise InvalidOption(f"{text!r:.100} holds a NUL character.")
    return text


def check_name(value: object, field: str, limit: int = NAME_LIMIT) -> str:
    """Refuse a name that is not a string, is empty, is too long, or cannot be stored."""
    if not isinstance(value, str):
        raise InvalidJob(f"{field} must be a string, not {type(value).__name__}.", field=field)
    if not value:
        raise InvalidJob(f"{field} is empty; give it a name.", field=field)
    if len(value) > limit:
        raise InvalidJob(
            f"{field} is {len(value)} characters long; the limit is {limit}.", field=field
        )
    check_text(value, field)
    return value


def check_integer(value: object, field: str, low: int, high: int) -> int:
    """Refuse what is not a whole number within its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(
            f"{field} must be a whole number, not {type(value).__name__}.", field=field
        )
    if not low <= value <= high:
        raise InvalidJob(
            f"{field} is {show(value)}; it must be between {low} and {high}.", field=field
        )
    return int.__index__(value)


def check_time(value: object, field: str) -> datetime:
    """Convert an aware datetime to UTC. Refuse a naive one."""
    if not isinstance(value, datetime):
        raise InvalidJob(f"{field} must be a datetime, not {type(value).__name__}.", field=field)
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJob(
            f"{field} is a naive datetime; give it a time zone, as in datetime.now(UTC).",
            field=field,
        )
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        moment = datetime.max.replace(tzinfo=UTC)
    if moment.year > LAST_YEAR:
        raise InvalidJob(
            f"{field} is {value.isoformat()}; the last year that can be used is {LAST_YEAR}.",
            field=field,
        )
    return moment


def to_timedelta(value: Seconds, field: str, *, minimum: float = 0) -> timedelta:
    """Convert a duration, a timedelta or a number of seconds. Raises `InvalidOption` for anything else."""
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise InvalidOption(
            f"{field} must be a timedelta or a number of seconds, not {type(value).__name__}."
        )
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise InvalidOption(
            f"{field} is {show(value)}, which is not a usable number of seconds."
        ) from None
    if duration.total_seconds() < minimum or duration > timedelta(days=36500):
        raise InvalidOption(
            f"{field} is {show(value)}; it must be at least {minimum} seconds and below a century."
        )
    return duration


def to_lease(value: Seconds) -> timedelta:
    """Convert the duration of a lease, within the limits of the database."""
    lease = to_timedelta(value, "lease", minimum=0.001)
    if lease > LEASE_LIMIT:
        raise InvalidOption(
            f"lease is {show(value)}; it must be at most 30 days. Extend it instead."
        )
    return lease


def to_seconds(value: Seconds, field: str) -> float:
    """Convert a duration that is a field of a job. Raises `InvalidJob`."""
    try:
        return to_timedelta(value, field).total_seconds()
    except InvalidOption as error:
        raise InvalidJob(str(error), field=field) from None


def show(value: object) -> str:
    """A value for a message: short, and safe if its `__repr__` fails."""
    try:
        return f"{value!r:.80}"
    except Exception:  # also an integer of more digits than Python prints
        return f"a {type(value).__name__} that cannot be shown"


def check_option(check: Callable[..., T], *arguments: Any) -> T:
    """Apply the check of a job's field to an option: raises `InvalidOption` instead of `InvalidJob`."""
    try:
        return check(*arguments)
    except InvalidJob as error:
        raise InvalidOption(error.message) from None
