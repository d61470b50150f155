"""Jobs that are refused when they are enqueued, and values that are sanitized when they are reported."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import socket
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from howdah import AsyncJobQueue, InvalidJob, InvalidOption, JobQueue, NewJob, PayloadTooLarge
from howdah.encoding import payload as bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg


# ── enqueueing ────────────────────────────────────────────────────────────────────────────────────


class Name(str):
    pass


class Count(int):
    pass


class Ratio(float):
    pass


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Plain(enum.Enum):
    ONE = 1


Point = namedtuple("Point", "x y")


def deep(levels: int, kind: type = list) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if kind is list else {"in": value}
    return value


def containing_itself(times: int) -> list[Any]:
    value: list[Any] = []
    value.extend([value] * times)
    return value


NOW = datetime(2030, 1, 1, tzinfo=UTC)

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("NUL in a string", {"data": ["a\x00b"]}, "data",
     "data holds a NUL character, which PostgreSQL cannot store."),
    ("NUL in a key", {"data": {"\x00": 1}}, "data",
     "data holds a NUL character, which PostgreSQL cannot store."),
    ("a lone surrogate", {"data": "\ud800"}, "data",
     "data holds a lone surrogate, which is not valid Unicode."),
    ("NaN", {"data": {"x": math.nan}}, "data", "data holds nan, which JSON does not have."),
    ("Infinity", {"data": [-math.inf]}, "data", "data holds -inf, which JSON does not have."),
    ("a NaN of another class", {"data": Ratio("nan")}, "data",
     "data holds nan, which JSON does not have."),
    ("101 levels", {"data": deep(101)}, "data",
     "data is nested deeper than 100 levels; flatten it or store a reference."),
    ("10,000 levels", {"data": deep(10_000, dict)}, "data",
     "data is nested deeper than 100 levels; flatten it or store a reference."),
    ("a list that contains itself", {"data": containing_itself(1)}, "data",
     "data is nested deeper than 100 levels; flatten it or store a reference."),
    ("a list that contains itself twice", {"data": containing_itself(2)}, "data",
     "data is over 65,536 bytes of JSON and the limit is 65,536. "
     "Store it elsewhere (a table, a bucket) and enqueue a reference to it."),
    ("a datetime", {"data": {"at": NOW}}, "data",
     "data holds a datetime, which JSON does not have. "
     "Convert it to a string, number, list or dict."),
    ("a set", {"data": {1}}, "data",
     "data holds a set, which JSON does not have. Convert it to a string, number, list or dict."),
    ("bytes", {"data": b"x"}, "data",
     "data holds a bytes, which JSON does not have. Convert it to a string, number, list or dict."),
    ("an object", {"data": object()}, "data",
     "data holds a object, which JSON does not have. Convert it to a string, number, list or dict."),
    ("a Decimal", {"data": Decimal(1)}, "data",
     "data holds a Decimal, which JSON does not have. "
     "Convert it to a string, number, list or dict."),
    ("an enum that is no string", {"data": Plain.ONE}, "data",
     "data holds a Plain, which JSON does not have. Convert it to a string, number, list or dict."),
    ("a key that is no string", {"data": {1: 2}}, "data",
     "data has the key 1, and JSON has only string keys."),
    ("an integer of 1,025 bits", {"data": 2**1024}, "data",
     "data holds an integer of 1025 bits; the limit is 1024. Pass it as a string."),
    ("a priority too high", {"priority": 1001}, "priority",
     "priority is 1001; it must be between -1000 and 1000."),
    ("a priority far too high", {"priority": 2**63}, "priority",
     "priority is 9223372036854775808; it must be between -1000 and 1000."),
    ("a priority beyond printing", {"priority": 10**5000}, "priority",
     "priority is a int that cannot be shown; it must be between -1000 and 1000."),
    ("a priority too low", {"priority": -1001}, "priority",
     "priority is -1001; it must be between -1000 and 1000."),
    ("a priority of True", {"priority": True}, "priority",
     "priority must be a whole number, not bool."),
    ("a priority of 100.0", {"priority": 100.0}, "priority",
     "priority must be a whole number, not float."),
    ("a priority in words", {"priority": "high"}, "priority",
     "priority must be a whole number, not str."),
    ("no attempts", {"max_attempts": 0}, "max_attempts",
     "max_attempts is 0; it must be between 1 and 10000."),
    ("3.0 attempts", {"max_attempts": 3.0}, "max_attempts",
     "max_attempts must be a whole number, not float."),
    ("a naive datetime", {"run_at": datetime(2030, 1, 1)}, "run_at",  # noqa: DTZ001
     "run_at is a naive datetime; give it a time zone, as in datetime.now(UTC)."),
    ("a date in words", {"run_at": "tomorrow"}, "run_at",
     "run_at must be a datetime, not str."),
    ("a date that no client could read back",
     {"run_at": datetime(9999, 12, 31, tzinfo=UTC)}, "run_at",
     "run_at is 9999-12-31T00:00:00+00:00; the last year that can be used is 9998."),
    ("a date that is beyond Python's in UTC",
     {"run_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))}, "run_at",
     "run_at is 9999-12-31T23:59:59.999999-12:00; the last year that can be used is 9998."),
    ("run_at and delay", {"run_at": NOW, "delay": 1}, "delay",
     "run_at and delay exclude each other; give one of them."),
    ("a negative delay", {"delay": -1}, "delay",
     "delay is -1; it must be at least 0 seconds and below a century."),
    ("a delay of NaN", {"delay": math.nan}, "delay",
     "delay is nan, which is not a usable number of seconds."),
    ("a delay of True", {"delay": True}, "delay",
     "delay must be a timedelta or a number of seconds, not bool."),
    ("a delay beyond printing", {"delay": 10**5000}, "delay",
     "delay is a int that cannot be shown, which is not a usable number of seconds."),
    ("a keep of two centuries", {"keep": timedelta(days=73_000)}, "keep",
     "keep is datetime.timedelta(days=73000); it must be at least 0 seconds and below a century."),
    ("an empty type", {"job_type": ""}, "job_type", "job_type is empty; give it a name."),
    ("a type of 201 characters", {"job_type": "x" * 201}, "job_type",
     "job_type is 201 characters long; the limit is 200."),
    ("a type that is no string", {"job_type": 7}, "job_type",
     "job_type must be a string, not int."),
    ("NUL in the type", {"job_type": "a\x00"}, "job_type",
     "job_type holds a NUL character, which PostgreSQL cannot store."),
    ("an empty queue", {"queue": ""}, "queue", "queue is empty; give it a name."),
    ("no queue", {"queue": None}, "queue", "queue must be a string, not NoneType."),
    ("an empty key", {"idempotency_key": ""}, "idempotency_key",
     "idempotency_key is empty; give it a name."),
    ("a key of 501 characters", {"idempotency_key": "k" * 501}, "idempotency_key",
     "idempotency_key is 501 characters long; the limit is 500."),
    ("an ordering key with a surrogate", {"ordering_key": "\udfff"}, "ordering_key",
     "ordering_key holds a lone surrogate, which is not valid Unicode."),
    ("a request id of 201 characters", {"request_id": "r" * 201}, "request_id",
     "request_id is 201 characters long; the limit is 200."),
]  # fmt: skip


@pytest.fixture(scope="module")
def nowhere() -> Iterator[tuple[str, socket.socket]]:
    """A URL, and the listening socket that would see a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        yield f"postgresql://u@127.0.0.1:{listening.getsockname()[1]}/db", listening


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [each[1:] for each in REFUSED],
    ids=[each[0] for each in REFUSED],
)
def test_a_bad_job_is_refused_before_anything_is_sent(
    nowhere: tuple[str, socket.socket], options: dict[str, Any], field: str, message: str
) -> None:
    url, listening = nowhere
    call = {"job_type": "work", **options}
    with pytest.raises(InvalidJob) as sync:
        JobQueue(url).enqueue(**call)
    with pytest.raises(InvalidJob) as bulk:
        JobQueue(url).enqueue_many([("fine", {}), call])
    with pytest.raises(InvalidJob) as awaited:
        asyncio.run(AsyncJobQueue(url).enqueue(**call))
    with pytest.raises(InvalidJob) as awaited_bulk:
        asyncio.run(AsyncJobQueue(url).enqueue_many([("fine", {}), call]))
    assert str(sync.value) == str(awaited.value) == message
    assert sync.value.field == field
    assert sync.value.index is None
    assert str(bulk.value) == str(awaited_bulk.value) == f"job 1: {message}"
    assert (bulk.value.field, bulk.value.index) == (field, 1)
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.parametrize("job", [7, "work", (1, 2), ("work", 1, 2), None, {"data": 1}])
def test_a_value_that_is_not_a_job_is_refused_with_its_index(job: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^job 2: (a \w+ is not a job; |job_type is missing\.)"):
        JobQueue("postgresql://").enqueue_many([("a", 1), NewJob(job_type="b"), job])


def test_an_unknown_option_of_a_job_in_bulk_is_refused_with_its_index_and_a_suggestion() -> None:
    with pytest.raises(InvalidOption) as caught:
        JobQueue("postgresql://").enqueue_many([("a", 1), {"job_type": "b", "prioritty": 3}])
    assert str(caught.value) == 'job 1: unknown option "prioritty"; did you mean "priority"?'
    with pytest.raises(InvalidOption, match=r'^job 0: unknown option "1"$'):
        JobQueue("postgresql://").enqueue_many([{"job_type": "b", 1: 2}])


def test_a_payload_of_exactly_the_limit_is_accepted_and_one_byte_more_is_refused(
    queue: JobQueue,
) -> None:
    fits = "x" * (64 * 1024 - 2)
    assert queue.get(queue.enqueue("big", fits)).data == fits
    with pytest.raises(PayloadTooLarge) as caught:
        queue.enqueue("big", fits + "x")
    assert str(caught.value) == (
        "data is 65,537 bytes of JSON and the limit is 65,536. "
        "Store it elsewhere (a table, a bucket) and enqueue a reference to it."
    )
    assert queue.pending() == 1


def test_python_and_the_database_count_the_same_bytes_of_a_payload(queue: JobQueue) -> None:
    # 1e300 and 1e-300 are five bytes in one notation and three hundred in another.
    def fill(n: int) -> list[Any]:
        return [1e300, -1e300, 1e-300, 'é\n\t\x1f"\\ /', {"a": [], "b": {}}] * 60 + ["x" * n]

    used = len(bytes(memoryview(bounds.encode_data(fill(0)))))
    exact = fill(64 * 1024 - used)
    assert queue.get(queue.enqueue("exact", exact)).data == exact
    with pytest.raises(PayloadTooLarge, match=r"^data is 65,537 bytes"):
        queue.enqueue("over", [*exact[:-1], exact[-1] + "x"])


def test_the_limit_of_a_payload_can_be_lowered() -> None:
    with pytest.raises(PayloadTooLarge, match="the limit is 10"):
        JobQueue("postgresql://", payload_limit=10).enqueue("work", "x" * 9)
    with pytest.raises(InvalidOption, match=r"^payload_limit must be a whole number, not float"):
        JobQueue("postgresql://", payload_limit=1e6)  # type: ignore[arg-type]


def test_a_payload_that_the_database_refuses_raises_payload_too_large_with_its_index(
    database: str,
) -> None:
    queue = JobQueue(database, payload_limit=200_000)  # more than the database accepts
    with pytest.raises(PayloadTooLarge) as caught:
        queue.enqueue_many([("small", 1), ("small", 2), ("big", "x" * 100_000)])
    assert caught.value.index == 2
    assert str(caught.value).startswith("job 2: the database refused data: ")
    with pytest.raises(PayloadTooLarge, match=r"^the database refused data: "):
        queue.enqueue("big", "x" * 100_000)
    assert queue.pending() == 0
    queue.close()


def test_subclasses_of_jsons_types_are_stored_as_these_types(queue: JobQueue) -> None:
    given = {
        "str": Name("n"), "int": Count(3), "float": Ratio(2.5), "long": Ratio(1e23),
        "enum": Colour.RED, "number": Size.BIG, Colour.RED: 1, Name("key"): 2,
        "pair": Point(1, 2), "tuple": (1, 2), "ordered": OrderedDict(a=1),
    }  # fmt: skip
    assert queue.get(queue.enqueue("work", given)).data == {
        "str": "n", "int": 3, "float": 2.5, "long": 1e23,
        "enum": "red", "number": 3, "red": 1, "key": 2,
        "pair": [1, 2], "tuple": [1, 2], "ordered": {"a": 1},
    }  # fmt: skip


def test_no_data_is_an_empty_object_in_every_form(queue: JobQueue) -> None:
    handles = [queue.enqueue("work"), queue.enqueue("work", None)]
    handles += queue.enqueue_many(
        [("work", None), {"job_type": "work"}, NewJob(job_type="work", data=None)]
    )
    assert [queue.get(each).data for each in handles] == [{}] * 5


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(2**1023), 2**1023) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=25,
)


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(batch=st.lists(values, min_size=1, max_size=40))
def test_stored_data_and_results_are_equal_to_the_originals(
    queue: JobQueue, batch: list[Any]
) -> None:
    queue.enqueue_many([("echo", {"value": value}) for value in batch])
    jobs = []
    while claimed := queue.claim("echo", batch_size=50):
        jobs += claimed
    assert [job.data["value"] for job in jobs] == batch
    queue.complete(jobs, [{"value": value} for value in batch])
    assert [queue.get(job).result["value"] for job in jobs[:5]] == batch[:5]


def test_a_float_stays_a_float(queue: JobQueue) -> None:
    floats = [1e15, 1e16, 1e22, 1e23, 1.7e308, -1e100, 5e-324, 0.00001, -0.0]
    queue.enqueue("work", floats)
    (job,) = queue.claim()
    queue.complete(job, floats)
    after = queue.get(job)
    assert after.data == after.result == floats
    assert {type(each) for each in (*after.data, *after.result)} == {float}


def test_numbers_and_depths_that_python_does_not_support_do_not_fail_a_claim(
    queue: JobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    conn = connect()
    for data in ("1", '{"n": 1e5000}', "[1e-5000, 1.5e400]", "2"):
        conn.execute("SELECT howdah.enqueue_job('sql', %s::jsonb)", (data,))
    jobs = queue.claim("sql")
    assert [job.data for job in jobs] == [1, {"n": "1" + "0" * 5000}, [0.0, 15 * 10**399], 2]
    deep_result = "[" * 5_000 + "]" * 5_000
    conn.execute(
        "SELECT howdah.complete_jobs(ARRAY[%s], ARRAY[%s], ARRAY[%s::jsonb])",
        (jobs[0].id, jobs[0].lease_id, deep_result),
    )
    result = queue.get(jobs[0]).result
    if isinstance(result, list):  # newer Pythons allow the parser that depth
        assert nesting(result) == 5_000
    else:
        assert result == deep_result
    assert len(queue.find()) == 4


def nesting(value: list[Any]) -> int:
    depth = 1
    while value:
        (value,) = value
        depth += 1
    return depth


# ── acknowledging ─────────────────────────────────────────────────────────────────────────────────


class Unreadable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Evil(dict[Any, Any]):
    def items(self) -> Any:
        raise SystemExit


class Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield 0


class Silent:
    def __str__(self) -> str:
        raise GeneratorExit


class Deceptive(int):
    def __int__(self) -> int:
        raise ValueError

    def bit_length(self) -> int:
        raise ValueError


@dataclass
class Node:
    inner: Any


def cyclic_node() -> Node:
    node = Node(None)
    node.inner = node
    return node


def cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value["b"] = value
    return value


UNSTORABLE = [
    "\x00", "\ud800", "x" * 200_000, math.nan, math.inf, 10**6000, deep(10_000), deep(10_000, dict),
    containing_itself(1), containing_itself(2), cyclic_dict(), cyclic_node(), Unreadable(), Silent(), Evil(),
    Endless([1]), Deceptive(3), object(), {1, 2}, b"\xff", {b"\xff": Silent()}, {Silent(): 1}, NOW,
    Decimal("1.5"), uuid.uuid4(), Plain.ONE, lambda: 0, (each for each in "ab"), msgspec.Raw(b"{"),
    list(range(100_000)), {"\x00\ud800": "\ud800\x00"}, 1j, type, NotImplemented,
]  # fmt: skip


@pytest.mark.parametrize("unstorable", UNSTORABLE, ids=[type(each).__name__ for each in UNSTORABLE])
def test_any_value_becomes_json_of_bounded_size(unstorable: Any) -> None:
    for value in (unstorable, [unstorable], {"k": unstorable}, Node(unstorable)):
        text = bounds.clean_json(value)
        json.loads(text)
        assert len(text.encode()) <= bounds.RESULT_LIMIT
        assert "\\u0000" not in text


def entangle(items: list[Any]) -> list[Any]:
    items.append({"self": items, "again": items})
    items.append(items)
    return items


everything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
    | st.datetimes() | st.decimals() | st.uuids() | st.complex_numbers()
    | st.sampled_from([Silent(), Evil(), Unreadable(), Deceptive(1), object(), Plain.ONE]),
    lambda inner: st.lists(inner)
    | st.dictionaries(st.text(st.characters()) | st.integers() | st.none(), inner)
    | st.tuples(inner, inner) | st.builds(Node, inner) | st.lists(inner).map(entangle),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=40)
@given(value=everything)
def test_cleaning_never_raises(value: Any) -> None:
    text = bounds.clean_json(value)
    json.loads(text)
    text.encode()
    assert len(text.encode()) <= bounds.RESULT_LIMIT


@settings(max_examples=200)
@given(text=st.text(st.characters()), limit=st.integers(1, 40))
def test_cleaned_text_is_short_enough_and_storable(text: str, limit: int) -> None:
    cleaned = bounds.clean_text(text, limit)
    assert len(cleaned) <= limit
    assert "\x00" not in cleaned
    cleaned.encode()


def test_a_result_over_the_limit_is_marked_as_truncated_and_keeps_its_start() -> None:
    cut = json.loads(bounds.clean_json("é" * 100_000))
    assert cut["truncated"] is True
    assert cut["bytes"] == 200_002
    assert cut["start"].startswith('"ééé')


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        ("plain", "plain"),
        (Unreadable(), "Unreadable: (its message could not be read: KeyboardInterrupt)"),
        (ValueError("a\x00b\ud800"), "ValueError: a\ufffdb?"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_becomes_its_type_and_message(error: BaseException | str, text: str) -> None:
    assert bounds.format_error(error) == text


def test_a_long_error_is_cut_to_the_limit() -> None:
    text = bounds.format_error(ValueError("x" * 10**6))
    assert len(text) == bounds.ERROR_LIMIT
    assert text.endswith("…")


def test_unstorable_values_in_reports_are_sanitized_and_do_not_affect_other_jobs(
    queue: JobQueue,
) -> None:
    queue.enqueue_many([("work", n) for n in range(len(UNSTORABLE) + 1)])
    jobs = queue.claim(batch_size=len(UNSTORABLE) + 1)
    for job, unstorable in zip(jobs, UNSTORABLE, strict=False):
        queue.progress(job, math.nan, stage=unstorable)
        queue.event(job, unstorable, unstorable)
    assert {queue.get(job).progress for job in jobs} == {0}
    assert all(len(queue.get(job).current_stage or "") <= 100 for job in jobs)
    queue.complete(jobs, [*UNSTORABLE, "fine"])
    assert queue.get(jobs[-1]).result == "fine"
    assert queue.get(jobs[0]).result == "\ufffd"
    assert [event.kind for event in queue.events(jobs[0])] == ["\ufffd"]
    assert queue.counts()["completed"] == len(jobs)


def test_unstorable_values_in_failures_are_sanitized(queue: JobQueue) -> None:
    errors: list[Any] = ["\x00\ud800" * 20_000, Unreadable(), ValueError("\x00"), Silent(), None]
    for error in errors:
        queue.enqueue("work", max_attempts=1)
        job = queue.claim_one()
        assert job is not None
        queue.fail(job, error)
        assert queue.get(job).status == "failed"
        assert queue.get(job).last_error
