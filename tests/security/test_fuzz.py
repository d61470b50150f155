"""Any command line, name or payload is accepted, or refused with an error message. No crash, no traceback, and no
partial write.

Deterministic and short; HOWDAH_FUZZ=100 tries a hundred times as many examples, different in each run."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from howdah import HowdahError, JobQueue, NewJob
from howdah.cli import SECTIONS, main
from howdah.errors import InvalidOption
from howdah.insight.filters import parse_condition
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.embedded import EmbeddedServer

EXAMPLES_FACTOR = float(os.environ.get("HOWDAH_FUZZ", "1"))


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=int(examples * EXAMPLES_FACTOR),
        derandomize=EXAMPLES_FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TABLES = ("live_jobs", "finished_jobs", "leases", "job_events", "idempotency_keys", "freed_keys", "lanes", "unassigned_keys",
          "workers", "watchers", "throughput")  # fmt: skip


class Fuzzed:
    """The fuzzed database and its contents."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.queue = JobQueue(url, worker_id="fuzz")
        self.conn = psycopg.connect(url, autocommit=True)

    def counts(self) -> list[int]:
        counted = ", ".join(f"(SELECT count(*) FROM howdah.{table})" for table in TABLES)
        (row,) = self.conn.execute(f"SELECT {counted}".encode()).fetchall()
        return list(row)

    def jobs(self) -> int:
        return sum(self.counts()[:2])


@pytest.fixture(scope="module")
def fuzzed(server: EmbeddedServer, template: str) -> Iterator[Fuzzed]:
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE fuzzed TEMPLATE {template}".encode())
    fuzzed = Fuzzed(server.url.replace("/howdah?", "/fuzzed?"))
    yield fuzzed
    fuzzed.queue.close()
    fuzzed.conn.close()
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("DROP DATABASE fuzzed WITH (FORCE)")


# ── payloads ──────────────────────────────────────────────────────────────────────────────────────


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: object


class NotJson:
    """An object that cannot be encoded as JSON."""


texts = st.text(st.characters(exclude_categories=()), max_size=30)
numbers = st.integers() | st.floats() | st.decimals() | st.booleans() | st.complex_numbers()
unusual_values = st.one_of(
    st.none(), texts, numbers, st.binary(max_size=20), st.datetimes(), st.dates(), st.times(),
    st.timedeltas(), st.uuids(), st.just(Colour.RED), st.just(NotJson()), st.just(NotJson), st.just(len),
    st.sets(st.integers(), max_size=3), st.integers(min_value=10**400, max_value=10**401),
)  # fmt: skip
values = st.recursive(
    unusual_values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts | st.integers() | st.none(), inner, max_size=4),
        st.tuples(inner, inner),
        inner.map(Point),
    ),
    max_leaves=12,
)


@fuzz(100)
@given(data=values)
@example(data={"x": "\ud800"})
@example(data={"\x00": 1})
@example(data={"x": float("nan")})
@example(data={"x": "y" * 70_000})
@example(data={"x": 10**5000})
@example(data={"x": decimal.Decimal("1e400000")})
@example(data={"x": datetime.timedelta.max})
def test_any_payload_is_stored_completely_or_refused_with_a_message(
    fuzzed: Fuzzed, data: Any
) -> None:
    before = fuzzed.jobs()
    try:
        handle = fuzzed.queue.enqueue("fuzz", data)
    except HowdahError as error:
        assert str(error)
        assert fuzzed.jobs() == before
        return
    assert fuzzed.jobs() == before + 1
    stored = fuzzed.queue.get(handle).data
    json.dumps(stored, allow_nan=False)
    # The stored payload can be enqueued again and stays the same.
    assert fuzzed.queue.get(fuzzed.queue.enqueue("fuzz", stored)).data == stored


@fuzz(40)
@given(datas=st.lists(values, min_size=1, max_size=4))
def test_enqueue_many_stores_all_payloads_or_none(fuzzed: Fuzzed, datas: list[Any]) -> None:
    before = fuzzed.jobs()
    try:
        fuzzed.queue.enqueue_many([NewJob(job_type="fuzz", data=data) for data in datas])
    except HowdahError:
        assert fuzzed.jobs() == before
    else:
        assert fuzzed.jobs() == before + len(datas)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [50, 99, 100, 101, 500, 5_000, 100_000])
def test_a_payload_of_fewer_than_99_levels_is_stored_and_a_refused_one_writes_nothing(
    fuzzed: Fuzzed, levels: int
) -> None:
    before = fuzzed.jobs()
    try:
        fuzzed.queue.enqueue("fuzz", {"x": deep(levels)})
    except HowdahError:
        assert levels >= 99
        assert fuzzed.jobs() == before


def test_a_recursive_payload_is_refused(fuzzed: Fuzzed) -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    before = fuzzed.jobs()
    with pytest.raises(HowdahError):
        fuzzed.queue.enqueue("fuzz", loop)
    assert fuzzed.jobs() == before


@fuzz(40)
@given(result=values, stage=texts, kind=texts, error=texts | values)
def test_a_job_can_be_read_after_any_result_stage_event_or_error(
    fuzzed: Fuzzed, result: Any, stage: str, kind: str, error: Any
) -> None:
    queue = fuzzed.queue
    handle = queue.enqueue("reports", queue="reports")
    job = queue.claim_one("reports", queues="reports")
    assert job is not None
    assert job.id == handle.id
    for attempt in (
        lambda: queue.progress(job, 10, stage),
        lambda: queue.event(job, kind, {"x": 1}),
        lambda: queue.event(job, "kind", result),
        lambda: queue.complete(job, result),
        lambda: queue.fail(job, error, retry=False),
        lambda: queue.fail(job, "plain", retry=False),
    ):
        try:
            attempt()
        except HowdahError as refusal:
            assert str(refusal)
    assert queue.get(handle).status.is_final
    queue.events(handle)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────

names = (
    texts
    | st.text(max_size=600)
    | st.sampled_from(["", "x" * 200, "x" * 201, "\x00", "\ud800", "'", '"'])
)
anything = names | values


FIELDS = ("job_type", "queue", "idempotency_key", "ordering_key", "request_id", "priority", "delay",
          "max_attempts", "keep", "run_at")  # fmt: skip


@fuzz(100)
@given(odd=st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=2))
def test_any_name_is_stored_unchanged_or_refused_with_a_message(
    fuzzed: Fuzzed, odd: dict[str, Any]
) -> None:
    before = fuzzed.jobs()
    try:
        handle = fuzzed.queue.enqueue(odd.get("job_type", "fuzz"), {}, **_without(odd, "job_type"))
    except HowdahError:
        assert fuzzed.jobs() == before
        return
    assert fuzzed.jobs() == before + int(handle.is_new)
    if handle.is_new:
        job = fuzzed.queue.get(handle)
        kept = {name: getattr(job, name) for name in FIELDS[:5] if name in odd}
        assert kept == _without(odd, *FIELDS[5:])


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


@fuzz(60)
@given(worker=names, types=st.none() | st.lists(names, max_size=3), queues=names | st.lists(names, max_size=3),
       size=st.just(1) | anything, lease=st.just(30) | anything)  # fmt: skip
def test_a_claim_with_any_arguments_works_or_is_refused_with_a_message(
    fuzzed: Fuzzed, worker: str, types: Any, queues: Any, size: Any, lease: Any
) -> None:
    before = fuzzed.jobs()
    try:
        queue = JobQueue(fuzzed.url, worker_id=worker)
    except HowdahError:
        return
    try:
        queue.release(*queue.claim(types, batch_size=size, lease=lease, queues=queues))
    except (HowdahError, TypeError) as error:
        assert isinstance(error, HowdahError) or "release" in str(error)
    finally:
        queue.close()
    assert fuzzed.jobs() == before


@fuzz(100)
@given(name=anything)
def test_any_schema_name_is_quoted_or_refused(fuzzed: Fuzzed, name: Any) -> None:
    try:
        quoted = quote_schema(name)
    except InvalidOption as error:
        assert str(error)
        return
    (row,) = fuzzed.conn.execute("SELECT quote_ident(%s) IN (%s, %s)", (name, quoted, name))
    assert row == (True,)


# ── filters ───────────────────────────────────────────────────────────────────────────────────────

columns = st.sampled_from(
    ["id", "type", "queue", "status", "priority", "attempts", "progress", "worker", "request_id",
     "ordering_key", "error", "age", "older", "newer", "data", "data.x", "data.x.y", "data..", "nothing"]
) | texts  # fmt: skip
operators = st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~", " = ", "==", ""]) | texts
operands = (
    texts
    | st.integers().map(str)
    | st.floats().map(str)
    | st.uuids().map(str)
    | values.map(lambda value: json.dumps(value, default=str, skipkeys=True))
    | st.sampled_from(
        [
            "failed",
            "failed,",
            "2h",
            "1e400",
            "99999999999d",
            "null",
            "{}",
            "[",
            "'; --",
            "$1",
            "{}{0}",
        ]
    )
)


@fuzz(200)
@given(text=texts | st.builds(lambda *parts: "".join(parts), columns, operators, operands))
def test_any_condition_is_parsed_and_run_or_refused_with_a_message(
    fuzzed: Fuzzed, text: str
) -> None:
    from howdah.insight.find import Search

    try:
        condition = parse_condition(text)
    except InvalidOption as error:
        assert str(error)
        return
    search = Search(fuzzed.queue._backend.store, "howdah")
    search.jobs([condition], 5)
    search.count([condition, condition])


@fuzz(100)
@given(filters=st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("status", "job_type", "queue", "request_id", "ordering_key", "worker_id", "data", "limit", "before"),
    anything | st.lists(anything, max_size=2))))  # fmt: skip
def test_find_with_any_filters_returns_jobs_or_is_refused_with_a_message(
    fuzzed: Fuzzed, filters: dict[str, Any]
) -> None:
    try:
        found = fuzzed.queue.find(**filters)
    except HowdahError as error:
        assert str(error)
    else:
        assert isinstance(found, list)


# ── the command line ──────────────────────────────────────────────────────────────────────────────

COMMANDS = {command.name: command for group in SECTIONS.values() for command in group}
# These run forever, start servers, or write files to given paths.
NOT_FUZZED = {"worker", "dev", "demo", "db", "skill", "watch", "wait", "tail", "top"}
OPTIONS = sorted(
    {opt for name, c in COMMANDS.items() if name not in NOT_FUZZED for p in c.params for opt in p.opts}
    - {"--database", "-h", "--help"}
)  # fmt: skip
arguments = (
    texts
    | operands
    | st.sampled_from(OPTIONS)
    | st.builds(
        lambda option, value: f"{option}={value}", st.sampled_from(OPTIONS), texts | operands
    )
    | st.sampled_from(
        ["0190", "-", "--", "ffff", "status=failed", "data.x=1", "1s", "-1", "\x1b[31m", "x" * 5000]
    )
)


@fuzz(60)
@given(
    command=st.sampled_from(sorted(set(COMMANDS) - NOT_FUZZED)),
    rest=st.lists(arguments, max_size=5),
)
@example(command="migrate", rest=["--schema=\ud800"])
@example(command="migrate", rest=["--grants=producer=\ud800"])
@example(command="jobs", rest=["--schema", "\ud800"])
@example(command="enqueue", rest=["\ud800:app"])
@example(command="enqueue", rest=[".:x"])
@example(command="cancel", rest=["--where", "data.x=" + "[" * 3000, "--yes"])
def test_no_command_crashes_on_any_arguments(fuzzed: Fuzzed, command: str, rest: list[str]) -> None:
    before = fuzzed.counts()
    result = CliRunner().invoke(main, [command, "--database", fuzzed.url, *rest], input="n\n")
    crash = result.exception
    assert crash is None or isinstance(crash, SystemExit), (command, rest, crash)
    assert "Traceback" not in result.output
    assert result.exit_code in range(6)
    if result.exit_code == 2:
        assert fuzzed.counts() == before


@fuzz(100)
@given(url=texts.map(lambda text: f"postgresql://{text}") | texts)
@example(url="postgresql://[::1")
@example(url="postgresql://u:p@h:port/d")
@example(url="postgresql://%zz@/d")
@example(url="postgresql:///d?host=\x00")
@example(url="postgresql://\ud800/d")
@example(url="embedded:\x00")
def test_no_url_crashes_a_command(fuzzed: Fuzzed, url: str) -> None:
    environment = {"PGCONNECT_TIMEOUT": "1", "PGHOST": "/nowhere", "PGPORT": "1"}
    if url.startswith("embedded:") and "\x00" not in url:
        return  # would start a server
    if "@" in url or "." in url or not url.isascii():
        url = url.replace("postgresql://", "postgresql:///")  # no DNS lookup
    result = CliRunner().invoke(main, ["jobs", "--database", url], env=environment)
    crash = result.exception
    assert crash is None or isinstance(crash, SystemExit), (url, crash)
    assert "Traceback" not in result.output


def test_ids_of_other_types_are_refused_with_a_message(fuzzed: Fuzzed) -> None:
    for job in (None, 1, "x", object(), uuid.uuid4().hex, b"x"):
        with pytest.raises((HowdahError, TypeError)) as refused:
            fuzzed.queue.get(job)  # type: ignore[arg-type]
        assert str(refused.value)
