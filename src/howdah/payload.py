"""Bounds and JSON. What a caller enqueues is checked and refused; what a worker reports is sanitised
and never refused, because by then the work is done. Knows nothing of databases."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.errors import InvalidJob, InvalidOption, PayloadTooLarge

if TYPE_CHECKING:
    from howdah.model import NewJob, Seconds

DATA_LIMIT = 64 * 1024
RESULT_LIMIT = 64 * 1024
ERROR_LIMIT = 16 * 1024
STAGE_LIMIT = 100
NAME_LIMIT = 200
KEY_LIMIT = 500
DEPTH_LIMIT = 100
MAX_ATTEMPTS_LIMIT = 10_000
PRIORITY_RANGE = (-1000, 1000)
INTEGER_BITS = 1024  # far beyond what readers in other languages hold, and cheap to print

_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode
"""JSON text or bytes → Python values."""


# ── enqueueing: refuse ────────────────────────────────────────────────────────────────────────────


def encode_data(data: Any, limit: int = DATA_LIMIT) -> msgspec.Raw:
    """The data as JSON, or an `InvalidJob` that says what JSON or PostgreSQL cannot hold."""
    _check_json(data)
    raw = _encode(data)
    if len(raw) > limit:
        raise PayloadTooLarge(
            f"data is {len(raw):,} bytes of JSON and the limit is {limit:,}. "
            "Store it elsewhere (a table, a bucket) and enqueue a reference to it.",
            field="data",
        )
    return msgspec.Raw(raw)


def _check_json(data: Any) -> None:
    """Walks the values without recursion: JSON's types only, finite, storable, not too deep."""
    level, depth = [data], 0
    while level:
        if depth > DEPTH_LIMIT:
            raise InvalidJob(
                f"data is nested deeper than {DEPTH_LIMIT} levels; flatten it or store a reference.",
                field="data",
            )
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                check_text(value, "data")
            elif kind is bool or value is None:
                pass
            elif kind is int:
                if value.bit_length() > INTEGER_BITS:
                    raise InvalidJob(
                        f"data holds an integer of {value.bit_length()} bits; the limit is "
                        f"{INTEGER_BITS}. Pass it as a string.",
                        field="data",
                    )
            elif kind is float:
                if not math.isfinite(value):
                    raise InvalidJob(f"data holds {value}, which JSON does not have.", field="data")
            elif isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise InvalidJob(
                            f"data has the key {key!r:.80}, and JSON has only string keys.",
                            field="data",
                        )
                    check_text(key, "data")
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
            elif isinstance(value, str | int | float):  # StrEnum and the like
                below.append(_plain(value))
            else:
                raise InvalidJob(
                    f"data holds a {kind.__name__}, which JSON does not have. "
                    "Convert it to a string, number, list or dict.",
                    field="data",
                )
        level, depth = below, depth + 1


def _plain(value: str | int | float) -> str | int | float:
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else float(value)


def check_text(text: str, field: str) -> None:
    """Refuses what PostgreSQL cannot store: NUL, and half of a surrogate pair."""
    if "\x00" in text:
        raise InvalidJob(
            f"{field} holds a NUL character, which PostgreSQL cannot store.", field=field
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidJob(
            f"{field} holds a lone surrogate, which is not valid Unicode.", field=field
        ) from None


def check_name(value: object, field: str, limit: int = NAME_LIMIT) -> str:
    """A text that is present, storable and not too long."""
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
    """A whole number within its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(
            f"{field} must be a whole number, not {type(value).__name__}.", field=field
        )
    if not low <= value <= high:
        raise InvalidJob(f"{field} is {value}; it must be between {low} and {high}.", field=field)
    return int(value)


def check_time(value: object, field: str) -> datetime:
    """A datetime that knows its time zone."""
    if not isinstance(value, datetime):
        raise InvalidJob(f"{field} must be a datetime, not {type(value).__name__}.", field=field)
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJob(
            f"{field} is a naive datetime; give it a time zone, as in datetime.now(UTC).",
            field=field,
        )
    return value


def to_timedelta(value: Seconds, field: str, *, minimum: float = 0) -> timedelta:
    """A duration in either of its two forms. Raises `InvalidOption` for anything else."""
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise InvalidOption(
            f"{field} must be a timedelta or a number of seconds, not {type(value).__name__}."
        )
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise InvalidOption(
            f"{field} is {value}, which is not a usable number of seconds."
        ) from None
    if duration.total_seconds() < minimum or duration > timedelta(days=36500):
        raise InvalidOption(
            f"{field} is {value}; it must be at least {minimum} seconds and below a century."
        )
    return duration


def _duration(value: Seconds, field: str) -> float:
    try:
        return to_timedelta(value, field).total_seconds()
    except InvalidOption as error:
        raise InvalidJob(str(error), field=field) from None


def encode_job(job: NewJob, limit: int = DATA_LIMIT) -> dict[str, Any]:
    """A checked job as the object that `enqueue_jobs` reads, less its id."""
    fields: dict[str, Any] = {
        "job_type": check_name(job.job_type, "job_type"),
        "data": encode_data(job.data, limit),
    }
    if job.queue != "default":
        fields["queue"] = check_name(job.queue, "queue")
    if job.priority != 100:
        fields["priority"] = check_integer(job.priority, "priority", *PRIORITY_RANGE)
    if job.max_attempts != 3:
        fields["max_attempts"] = check_integer(
            job.max_attempts, "max_attempts", 1, MAX_ATTEMPTS_LIMIT
        )
    if job.run_at is not None:
        if job.delay is not None:
            raise InvalidJob(
                "run_at and delay exclude each other; give one of them.", field="delay"
            )
        fields["run_at"] = check_time(job.run_at, "run_at").isoformat()
    if job.delay is not None:
        fields["delay"] = _duration(job.delay, "delay")
    if job.keep is not None:
        fields["keep"] = f"{_duration(job.keep, 'keep')} seconds"
    for field, longest in _TEXT_FIELDS:
        value = getattr(job, field)
        if value is not None:
            fields[field] = check_name(value, field, longest)
    return fields


_TEXT_FIELDS = (
    ("idempotency_key", KEY_LIMIT),
    ("ordering_key", KEY_LIMIT),
    ("request_id", NAME_LIMIT),
    ("traceparent", NAME_LIMIT),
)


def encode_batch(jobs: list[dict[str, Any]]) -> str:
    """Encoded jobs as the one JSON text that `enqueue_jobs` takes."""
    return _encode(jobs).decode()


# ── acknowledging: sanitise ───────────────────────────────────────────────────────────────────────


def clean_text(text: str, limit: int) -> str:
    """The text without what PostgreSQL cannot store, cut to `limit` characters."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8", "replace")


def describe_error(error: BaseException | str) -> str:
    """`Type: message` of an exception, even of one whose `__str__` raises."""
    if isinstance(error, str):
        return clean_text(error, ERROR_LIMIT)
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as second:  # it may do anything
        message = f"(its message could not be read: {type(second).__name__})"
    return clean_text(f"{name}: {message}" if message else name, ERROR_LIMIT)


def clean_json(value: Any, limit: int = RESULT_LIMIT) -> str:
    """The value as JSON text that PostgreSQL can store: what JSON cannot hold becomes text."""
    raw = _encode(_clean(value, 0))
    if len(raw) > limit:
        raw = _encode(
            {"truncated": True, "bytes": len(raw), "start": raw[:1000].decode("utf-8", "replace")}
        )
    return raw.decode()


def _clean(value: Any, depth: int) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return clean_text(value, max(len(value), 1))
        case int():
            return int(value) if value.bit_length() <= INTEGER_BITS else hex(value)
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case _ if depth >= DEPTH_LIMIT:
            return "…"
        case dict():
            return {clean_text(_text(k), KEY_LIMIT): _clean(v, depth + 1) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_clean(item, depth + 1) for item in value]
        case _:
            try:
                built = msgspec.to_builtins(value)
            except Exception:
                return clean_text(_text(value), ERROR_LIMIT)
            return _clean(built, depth + 1)


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException as error:
        return f"({type(value).__name__} whose text could not be read: {type(error).__name__})"
