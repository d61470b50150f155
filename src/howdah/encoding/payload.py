"""Jobs as JSON. Data to be enqueued are checked and may be refused. Results and reports of a worker are
sanitized and never refused, because the work is done by then. No I/O."""

from __future__ import annotations

import functools
import json
import math
import operator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.encoding import validation
from howdah.errors import InvalidJob, InvalidOption, PayloadTooLarge
from howdah.model import NewJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

DATA_LIMIT = 64 * 1024  # bytes
RESULT_LIMIT = 64 * 1024  # bytes
ERROR_LIMIT = 16 * 1024  # characters
STAGE_LIMIT = 100  # characters
KEY_LIMIT = 500  # characters
DEPTH_LIMIT = 100  # levels
MAX_ATTEMPTS_LIMIT = 10_000
PRIORITY_RANGE = (-1000, 1000)
INTEGER_BITS = 1024  # more than parsers in other languages support, and cheap to print


def _plain(value: object) -> str | int | float:
    """The plain value behind a subclass of str, int or float."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_decode = msgspec.json.Decoder().decode


def decode(text: str) -> Any:
    """JSON from the database as Python values. Never raises: SQL callers can store numbers and depths that
    Python does not support, and one such job must not fail the batch that it is claimed with."""
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        try:
            return json.loads(text, parse_int=_parse_integer)
        except (ValueError, RecursionError):
            return text


def _parse_integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return digits


# ── enqueueing: refuse ────────────────────────────────────────────────────────────────────────────


def encode_data(data: Any, limit: int = DATA_LIMIT) -> msgspec.Raw:
    """The data as JSON. Raises `InvalidJob` if JSON or PostgreSQL cannot represent them."""
    if not _is_simple(data) and _check_json(data, limit):
        data = _expand_floats(data)
    raw = _encode(data)
    if len(raw) > limit:
        raise _too_large(f"{len(raw):,} bytes", limit)
    return msgspec.Raw(raw)


def _too_large(size: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"data is {size} of JSON and the limit is {limit:,}. "
        "Store it elsewhere (a table, a bucket) and enqueue a reference to it.",
        field="data",
    )


def _is_simple(data: Any) -> bool:
    """Whether the data need not be checked by `_check_json`, which takes three times as long: an object of
    ASCII texts, small integers, true, false and null."""
    if type(data) is not dict:
        return False
    for key, value in data.items():
        if type(key) is not str or not key.isascii() or "\x00" in key:
            return False
        kind = type(value)
        if kind is str:
            if not value.isascii() or "\x00" in value:
                return False
        elif kind is int:
            if not -(2**63) <= value < 2**63:
                return False
        elif kind is not bool and value is not None:
            return False
    return True


def _check_json(data: Any, limit: int) -> bool:
    """Check the values without recursion: only JSON's types, finite, storable, not nested too deeply.

    Returns whether there is a float for `_expand_float`.
    """
    level, depth, values, expand = [data], 0, 0, False
    while level:
        if depth > DEPTH_LIMIT:
            raise InvalidJob(
                f"data is nested deeper than {DEPTH_LIMIT} levels; flatten it or store a reference.",
                field="data",
            )
        # A value takes at least one byte. Without this limit, a list that contains itself twice would be
        # walked forever.
        values += len(level)
        if values > limit:
            raise _too_large(f"over {limit:,} bytes", limit)
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                validation.check_text(value, "data")
            elif kind is bool or value is None:
                pass
            elif kind is int:
                _check_size(value)
            elif kind is float:
                expand = _check_finite(value) or expand
            elif isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise InvalidJob(
                            f"data has the key {validation.show(key)}, and JSON has only string keys.",
                            field="data",
                        )
                    validation.check_text(key, "data")
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
            elif isinstance(value, str | int | float):  # a subclass, such as StrEnum
                below.append(_plain(value))
            else:
                raise InvalidJob(
                    f"data holds a {kind.__name__}, which JSON does not have. "
                    "Convert it to a string, number, list or dict.",
                    field="data",
                )
        level, depth = below, depth + 1
    return expand


def _check_size(value: int) -> None:
    if value.bit_length() > INTEGER_BITS:
        raise InvalidJob(
            f"data holds an integer of {value.bit_length()} bits; the limit is "
            f"{INTEGER_BITS}. Pass it as a string.",
            field="data",
        )


def _check_finite(value: float) -> bool:
    if not math.isfinite(value):
        raise InvalidJob(f"data holds {value}, which JSON does not have.", field="data")
    return _needs_expanding(value)


def _needs_expanding(value: float) -> bool:
    return not 1e-4 <= abs(value) < 1e15 and value != 0


def _expand_float(value: float) -> msgspec.Raw:
    """A float with all its digits. PostgreSQL would return 1e23 as an integer, which is not equal to it, while
    100…000.0 stays a float. Its length here is also its length in the database."""
    text = format(Decimal(repr(value)), "f")
    return msgspec.Raw((text if "." in text else f"{text}.0").encode())


def _expand_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand_floats(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_expand_floats(each) for each in value]
    if isinstance(value, float):
        value = float.__float__(value)
        return _expand_float(value) if _needs_expanding(value) else value
    return value


def encode_job(job: NewJob, job_id: UUID, limit: int = DATA_LIMIT) -> dict[str, Any]:
    """A checked job as the object that `enqueue_jobs` reads."""
    common = _common(job)
    try:
        fields = _encode_common(*common).copy()
    except TypeError:  # an unhashable value, which the checks refuse
        fields = _encode_common.__wrapped__(*common)
    fields["id"] = job_id
    fields["data"] = encode_data({} if job.data is None else job.data, limit)
    if job.run_at is not None:
        if job.delay is not None:
            raise InvalidJob(
                "run_at and delay exclude each other; give one of them.", field="delay"
            )
        fields["run_at"] = validation.check_time(job.run_at, "run_at").isoformat()
    if job.delay is not None:
        fields["delay"] = validation.to_seconds(job.delay, "delay")
    if (texts := _texts(job)) != _NO_TEXTS:
        for (field, longest), value in zip(_TEXT_FIELDS, texts, strict=True):
            if value is not None:
                fields[field] = validation.check_name(value, field, longest)
    if job.idempotency_ttl is not None:
        if job.idempotency_key is None:
            raise InvalidJob(
                "idempotency_ttl is the lifetime of an idempotency_key, and there is none.",
                field="idempotency_ttl",
            )
        seconds = validation.to_seconds(job.idempotency_ttl, "idempotency_ttl")
        fields["idempotency_ttl"] = f"{seconds:f} seconds"
    return fields


# Checks of the fields that the jobs of one task have in common, and their encoding.
_COMMON_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "job_type": validation.check_name,
    "queue": validation.check_name,
    "priority": lambda value, field: validation.check_integer(value, field, *PRIORITY_RANGE),
    "max_attempts": lambda value, field: validation.check_integer(
        value, field, 1, MAX_ATTEMPTS_LIMIT
    ),
    "keep": lambda value, field: f"{validation.to_seconds(value, field):f} seconds",
}
_common = operator.attrgetter(*_COMMON_FIELDS)
_DEFAULTS = NewJob(job_type="")


@functools.lru_cache(maxsize=256, typed=True)
def _encode_common(*values: Any) -> dict[str, Any]:
    """The common fields, checked once for all jobs with the same values. A value that is the default is
    left out, because the database has the same defaults and need not parse it."""
    fields: dict[str, Any] = {}
    for (field, check), value in zip(_COMMON_FIELDS.items(), values, strict=True):
        default = getattr(_DEFAULTS, field)
        if value is None and default is None:
            continue
        encoded = check(value, field)
        if encoded != default:
            fields[field] = encoded
    return fields


_TEXT_FIELDS = (
    ("idempotency_key", KEY_LIMIT),
    ("ordering_key", KEY_LIMIT),
    ("request_id", validation.NAME_LIMIT),
    ("traceparent", validation.NAME_LIMIT),
)
_NO_TEXTS = (None,) * len(_TEXT_FIELDS)
_texts = operator.attrgetter(*(field for field, _ in _TEXT_FIELDS))


def encode_batch(jobs: Sequence[Any]) -> str:
    """Encoded jobs as the one JSON text that `enqueue_jobs` takes."""
    return _encode(jobs).decode()


# ── acknowledging: sanitize ───────────────────────────────────────────────────────────────────────


def clean_text(text: object, limit: int) -> str:
    """The text of any value, without characters that PostgreSQL cannot store, cut to `limit` characters."""
    plain = str.__str__(text) if isinstance(text, str) else _text(text)
    if len(plain) > limit:
        plain = plain[: limit - 1] + "…"
    return plain.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8", "replace")


def clean_percent(percent: object) -> int | None:
    """A number as whole percent. None, which leaves progress unchanged, for NaN."""
    if percent is None:
        return None
    if not isinstance(percent, int | float):
        raise InvalidOption(f"percent must be a number, not {type(percent).__name__}.")
    return None if math.isnan(percent) else int(max(0, min(100, percent)))


def format_error(error: BaseException | str) -> str:
    """`Type: message` of an exception, even if its `__str__` raises."""
    if isinstance(error, str):
        return clean_text(error, ERROR_LIMIT)
    name = type(error).__name__
    try:
        message = str.__str__(str(error))
    except BaseException as second:  # a user's `__str__` may raise anything
        message = f"(its message could not be read: {type(second).__name__})"
    return clean_text(f"{name}: {message}" if message else name, ERROR_LIMIT)


def clean_json(value: Any, limit: int = RESULT_LIMIT) -> str:
    """The value as JSON text that PostgreSQL can store. Values that JSON cannot represent become text."""
    raw = _encode(_Cleaner(limit).clean(value, 0))
    if len(raw) > limit:
        raw = _encode(
            {"truncated": True, "bytes": len(raw), "start": raw[:1000].decode("utf-8", "replace")}
        )
    return raw.decode()


class _Cleaner:
    """Copies a value into JSON's types. Stops when the result is over the limit, so that a structure that
    contains itself or an endless iterator is not followed forever."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def clean(self, value: Any, depth: int) -> Any:
        try:
            return self._clean(value, depth)
        except BaseException as error:  # an overridden method may raise anything
            return f"({type(value).__name__} that could not be read: {type(error).__name__})"

    def _clean(self, value: Any, depth: int) -> Any:
        self._left -= 1
        match value:
            case None | bool():
                return value
            case str():
                return clean_text(value, max(str.__len__(value), 1))
            case int():
                whole = int.__index__(value)
                return whole if whole.bit_length() <= INTEGER_BITS else hex(whole)
            case float():
                number = float.__float__(value)
                if not math.isfinite(number):
                    return str(number)
                return _expand_float(number) if _needs_expanding(number) else number
            case _ if depth >= DEPTH_LIMIT or self._left < 0:
                return "…"
            case dict():
                return {
                    clean_text(key, KEY_LIMIT): self.clean(each, depth + 1)
                    for key, each in self._until_full(value.items())
                }
            case list() | tuple() | set() | frozenset():
                return [self.clean(each, depth + 1) for each in self._until_full(value)]
            case _:
                try:
                    built = msgspec.to_builtins(value)
                except BaseException:
                    return clean_text(value, ERROR_LIMIT)
                return self._clean(built, depth + 1)

    def _until_full(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            if self._left < 0:
                break
            yield value


def _text(value: object) -> str:
    try:
        return str.__str__(str(value))
    except BaseException as error:
        return f"({type(value).__name__} whose text could not be read: {type(error).__name__})"
