"""Statements: their names, and their columns against those of the database."""

from __future__ import annotations

import inspect
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, get_args
from uuid import UUID

import msgspec
import pytest

from howdah import Event, Job, JobQueue, NewJob, Status
from howdah.encoding import copy_format, payload
from howdah.protocol.filters import Filters
from howdah.protocol.operations import FIND_OPTIONS
from howdah.protocol.worker_statements import Claimed, WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from howdah.protocol.statements import Statement


SAMPLES: dict[str, Any] = {
    "str": "x",
    "int": 1,
    "bool": False,
    "UUID": UUID(int=0),
    "timedelta": timedelta(0),
    "Filters": Filters(),
}
METHODS = [name for name, _ in inspect.getmembers(WorkerStatements, inspect.isfunction)
           if not name.startswith("_")]  # fmt: skip


def build(name: str) -> Statement[Any]:
    """The statement that a method builds for some arguments of the annotated types."""
    method = getattr(WorkerStatements("howdah"), name)
    arguments = {
        parameter.name: _sample(parameter.annotation)
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
    }
    statement: Statement[Any] = method(**arguments)
    return statement


def _sample(annotation: str) -> Any:
    if annotation.endswith("| None"):
        return None
    return () if "[" in annotation else SAMPLES[annotation]


@pytest.mark.parametrize("name", METHODS)
def test_a_statement_carries_the_name_of_its_function_or_method(name: str) -> None:
    statement = build(name)
    forms = [statement] if statement.resend is None else [statement, statement.resend()]
    for form in forms:
        functions = re.findall(r'"howdah"\.(\w+)\(', form.text)
        assert [form.operation] == (functions or [name])


# ── columns ───────────────────────────────────────────────────────────────────────────────────────

TYPES = {
    UUID: {"uuid"}, int: {"smallint", "integer", "bigint"}, str: {"text"}, Status: {"text"},
    bool: {"boolean"}, datetime: {"timestamp with time zone"}, timedelta: {"interval"}, Any: {"jsonb"},
}  # fmt: skip


@pytest.fixture
def columns(connect: Callable[[], psycopg.Connection[Any]]) -> Callable[[str], dict[str, str]]:
    def read(relation: str) -> dict[str, str]:
        """The columns of a relation and their types, in order."""
        return dict(
            connect()
            .execute(
                "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
                "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                [f"howdah.{relation}"],
            )
            .fetchall()
        )

    return read


@pytest.mark.parametrize(("struct", "relation"), [(Job, "jobs"), (Event, "job_events")])
def test_the_fields_of_a_struct_are_the_columns_of_its_relation(
    columns: Callable[[str], dict[str, str]], struct: type[msgspec.Struct], relation: str
) -> None:
    found = columns(relation)
    found.pop("drop_on", None)  # the key of the partitions
    assert list(found) == list(struct.__struct_fields__)
    for field in msgspec.structs.fields(struct):
        kinds = get_args(field.type) or (field.type,)
        assert found[field.name] in TYPES[kinds[0]], field.name


def test_a_worker_reads_columns_of_jobs_and_the_time_they_waited(
    columns: Callable[[str], dict[str, str]],
) -> None:
    assert {*Claimed.__struct_fields__} - {*columns("jobs")} == {"waited"}


def test_copy_fills_columns_of_live_jobs(columns: Callable[[str], dict[str, str]]) -> None:
    assert {*copy_format.COLUMNS} <= {*columns("live_jobs")}


def test_the_fields_of_a_new_job_are_the_parameters_of_enqueue_job(
    connect: Callable[[], psycopg.Connection[Any]],
) -> None:
    row = connect().execute(
        "SELECT proargnames FROM pg_proc WHERE oid = 'howdah.enqueue_job'::regproc"
    ).fetchone()  # fmt: skip
    assert row is not None
    sql = {name.removeprefix("p_") for name in row[0]}
    python = {*NewJob.__struct_fields__}
    assert python - sql == {"delay"}  # in SQL: p_run_at => now() + delay
    assert sql - python == {"id"}  # in Python: made by the queue


def test_enqueue_has_a_parameter_with_the_same_default_for_each_field_of_a_new_job() -> None:
    parameters = {**inspect.signature(JobQueue.enqueue).parameters}
    for name in ("self", "conn", "unknown"):
        del parameters[name]
    assert {*parameters} == {*NewJob.__struct_fields__}
    defaults = NewJob(job_type="")
    for name in {*parameters} - {"job_type", "data"}:
        assert parameters[name].default == getattr(defaults, name), name


def test_every_field_of_a_new_job_is_sent() -> None:
    job = NewJob(
        job_type="work", data=1, priority=1, queue="q", run_at=datetime(2040, 1, 1, tzinfo=UTC),
        max_attempts=9, idempotency_key="i", idempotency_ttl=1, ordering_key="o", request_id="r",
        traceparent="t", keep=1,
    )  # fmt: skip
    defaults = NewJob(job_type="")
    unset = {
        name for name in job.__struct_fields__ if getattr(job, name) == getattr(defaults, name)
    }
    assert unset == {"delay"}
    later = msgspec.structs.replace(job, run_at=None, delay=5)
    sent = (
        payload.encode_job(job, UUID(int=0)).keys() | payload.encode_job(later, UUID(int=0)).keys()
    )
    assert sent == {*NewJob.__struct_fields__, "id"}


def test_find_has_a_parameter_for_each_filter() -> None:
    parameters = {*inspect.signature(JobQueue.find).parameters} - {"self", "unknown"}
    assert parameters == {*FIND_OPTIONS, "limit"}
