"""Apps and tasks: registering, calling, enqueueing, and the conversion of arguments and results."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict
from uuid import UUID

import asyncpg
import msgspec
import psycopg
import pydantic
import pytest

from howdah import (
    App,
    Context,
    DuplicateTask,
    InvalidJob,
    InvalidOption,
    PayloadTooLarge,
    Status,
    UnknownTask,
    Worker,
)
from waiting import ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from howdah.nowhere import Hidden  # type: ignore[import-not-found]

    from conftest import RunWorker


# ── registering ───────────────────────────────────────────────────────────────────────────────────


def test_a_task_has_the_name_of_its_function_and_is_callable(sync_app: App) -> None:
    @sync_app.task
    def add(x: int, y: int = 2) -> int:
        """Adds."""
        return x + y

    @sync_app.task(name="other.name")
    def other() -> None: ...

    assert (add.name, add.__name__, add.__doc__) == ("add", "add", "Adds.")
    assert add(1) == 3
    assert other.name == "other.name"
    assert list(sync_app.tasks) == ["add", "other.name"]
    assert sync_app.get_task("add") is add


def test_two_tasks_with_one_name_are_rejected(sync_app: App) -> None:
    @sync_app.task(name="send")
    def send_mail() -> None: ...

    with pytest.raises(
        DuplicateTask, match=r'two tasks are named "send": .*send_mail and .*send_sms'
    ):

        @sync_app.task(name="send")
        def send_sms() -> None: ...


def test_an_unknown_task_raises_with_the_nearest_name(sync_app: App) -> None:
    @sync_app.task
    def send_email() -> None: ...

    with pytest.raises(UnknownTask) as caught:
        sync_app.get_task("send_emial")
    assert str(caught.value) == (
        'no task named "send_emial" is registered; did you mean "send_email"?'
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"run_in": "proces"}, 'unknown run_in "proces"; did you mean "process"?'),
        ({"run_in": "async"}, 'f is a def, which cannot run_in="async".'),
        ({"priority": 5000}, "priority is 5000; it must be between -1000 and 1000."),
        ({"max_attempts": 0}, "max_attempts is 0; it must be between 1 and 10000."),
        ({"queue": ""}, "queue is empty; give it a name."),
        ({"timeout": -1}, "timeout is -1; it must be at least 0.001 seconds and below a century."),
        ({"keep": "5m"}, "keep must be a timedelta or a number of seconds, not str."),
        (
            {"memory_limit": 1},
            'memory_limit needs run_in="process": it cannot be enforced in the worker\'s own process.',
        ),
        ({"retry": 3}, "retry must be a Retry or a callable (attempt, error) -> seconds, not int."),
        ({"name": "x" * 201}, "the task's name is 201 characters long; the limit is 200."),
    ],
)
def test_an_invalid_option_is_rejected_when_the_task_is_made(
    sync_app: App, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        sync_app.task(**options)(function_f())
    assert str(caught.value) == sentence


def function_f() -> Callable[[], None]:
    def f() -> None: ...

    return f


def test_a_generator_cannot_be_a_task(sync_app: App) -> None:
    def counts() -> Iterator[int]:
        yield 1

    async def acounts() -> AsyncIterator[int]:
        yield 1

    for function in (counts, acounts):
        with pytest.raises(InvalidOption) as caught:
            sync_app.task(function)
        assert str(caught.value) == (
            f"{function.__name__} is a generator, because it contains yield; a task returns its result."
        )


def test_an_async_def_cannot_run_in_a_thread(sync_app: App) -> None:
    with pytest.raises(InvalidOption, match='is an async def, which cannot run_in="thread"'):

        @sync_app.task(run_in="thread")
        async def coroutine() -> None: ...


def test_a_worker_rejects_a_process_task_defined_inside_a_function(sync_app: App) -> None:
    @sync_app.task(run_in="process")
    def inner() -> None: ...

    with pytest.raises(InvalidOption, match="move it to the top level of its module"):
        Worker(sync_app)


def test_a_worker_of_an_app_without_tasks_is_rejected(sync_app: App) -> None:
    with pytest.raises(InvalidOption, match="the app has no tasks"):
        Worker(sync_app)


# ── enqueueing ────────────────────────────────────────────────────────────────────────────────────


def test_jobs_get_the_options_of_their_task_and_options_of_a_call_override_them(
    sync_app: App,
) -> None:
    @sync_app.task(queue="mail", priority=150, max_attempts=9, keep=60)
    def send(to: str) -> None: ...

    job = send.enqueue("a").job()
    assert (job.queue, job.priority, job.max_attempts) == ("mail", 150, 9)
    assert (job.keep, job.data) == (timedelta(seconds=60), {"to": "a"})
    later = send.using(delay=300, queue="post", priority=1).using(ordering_key="k", request_id="r")
    job = later.enqueue(to="b").job()
    assert (job.queue, job.priority, job.ordering_key, job.request_id) == ("post", 1, "k", "r")
    assert timedelta(seconds=299) < job.run_at - job.created_at < timedelta(seconds=310)
    assert send.enqueue("c").job().priority == 150


def test_an_unknown_option_of_a_call_raises_with_the_nearest_name(sync_app: App) -> None:
    @sync_app.task
    def f() -> None: ...

    with pytest.raises(InvalidOption) as caught:
        f.using(ordering_kei="x")
    assert str(caught.value) == 'unknown option "ordering_kei"; did you mean "ordering_key"?'


def test_a_second_call_with_one_idempotency_key_returns_the_first_job(sync_app: App) -> None:
    @sync_app.task
    def f(x: int) -> None: ...

    once = f.using(idempotency_key="f-1")
    first, second = once.enqueue(1), once.enqueue(1)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.id == second.id
    assert second.job().data == {"x": 1}


def test_an_enqueue_is_part_of_the_callers_transaction(sync_app: App, database: str) -> None:
    @sync_app.task
    def joined(x: int) -> None: ...

    with psycopg.connect(database) as conn:
        kept = joined.using(conn=conn).enqueue(1)
        many = joined.using(conn=conn).enqueue_many([(2,), (3,)])
        assert sync_app.find(job_type="joined") == []
        conn.commit()
        joined.using(conn=conn).enqueue(4)
        conn.rollback()
    found = {job.id for job in sync_app.find(job_type="joined")}
    assert found == {kept.id, *(handle.id for handle in many)}


async def test_an_async_enqueue_is_part_of_the_callers_transaction(app: App, database: str) -> None:
    @app.task
    async def af(x: int) -> None: ...

    conn = await asyncpg.connect(database)
    async with conn.transaction():
        kept = await af.using(conn=conn).aenqueue(1)
    rolled_back = conn.transaction()
    await rolled_back.start()
    await af.using(conn=conn).aenqueue_many([(2,)])
    await rolled_back.rollback()
    await conn.close()
    assert [job.id for job in await app.aqueue.find(job_type="af")] == [kept.id]


def test_many_calls_are_enqueued_all_or_none(sync_app: App) -> None:
    @sync_app.task
    def both(x: int, y: str = "d") -> None: ...

    handles = both.enqueue_many([(1,), {"x": 2, "y": "e"}, [3, "f"]])  # type: ignore[list-item]
    assert [handle.job().data for handle in handles] == [
        {"x": 1}, {"x": 2, "y": "e"}, {"x": 3, "y": "f"},
    ]  # fmt: skip
    with pytest.raises(InvalidJob, match=r"job 1: both: argument 'x'") as caught:
        both.enqueue_many([(1,), ("two",)])
    assert caught.value.index == 1
    assert len(sync_app.find(job_type="both")) == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ((), {}, "bound(x: 'int', y: 'str' = '') -> 'None': missing a required argument: 'x'."),
        (
            (1, "a", 2),
            {},
            "bound(x: 'int', y: 'str' = '') -> 'None': too many positional arguments.",
        ),
        (
            (1,),
            {"z": 1},
            "bound(x: 'int', y: 'str' = '') -> 'None': got an unexpected keyword argument 'z'.",
        ),
        (("1",), {}, "bound: argument 'x': Expected `int`, got `str`."),
        ((1,), {"y": 2}, "bound: argument 'y': Expected `str`, got `int`."),
        ((object(),), {}, "argument 'x': a object cannot be stored as JSON."),
        ((1, "\x00"), {}, "data holds a NUL character, which PostgreSQL cannot store."),
    ],
)
def test_arguments_are_checked_when_they_are_enqueued_and_nothing_is_written(
    sync_app: App, args: tuple[Any, ...], kwargs: dict[str, Any], sentence: str
) -> None:
    @sync_app.task
    def bound(x: int, y: str = "") -> None: ...

    with pytest.raises(InvalidJob) as caught:
        bound.enqueue(*args, **kwargs)
    assert str(caught.value) == sentence
    assert caught.value.field == "data"
    assert sync_app.find(job_type="bound") == []


def test_data_over_the_limit_are_rejected(sync_app: App) -> None:
    @sync_app.task
    def large(x: str) -> None: ...

    with pytest.raises(PayloadTooLarge):
        large.enqueue("x" * 70_000)


# ── arguments and results ──────────────────────────────────────────────────────────────


@dataclass
class Point:
    x: int
    at: datetime


class Options(TypedDict, total=False):
    width: int


class Colour(Enum):
    GREY = "grey"


class Size(StrEnum):
    BIG = "big"


class Struct(msgspec.Struct):
    day: date
    inner: list[Point]


class Pair(NamedTuple):
    left: int
    right: str


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    when: datetime
    price: Decimal


NOW = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
ID = UUID("0198b3a0-0000-7000-8000-000000000001")
POINT = Point(1, NOW)
VALUES: list[tuple[Any, Any]] = [
    (Point, POINT),
    (Options, {"width": 3}),
    (datetime, NOW),
    (UUID, ID),
    (Decimal, Decimal("1.10")),
    (Colour, Colour.GREY),
    (Size, Size.BIG),
    (Struct, Struct(date(2026, 1, 2), [POINT])),
    (Pair, Pair(1, "a")),
    (Model, Model(when=NOW, price=Decimal("9.99"))),
    (list[Model], [Model(when=NOW, price=Decimal("9.99"))]),
    (Path, Path("/tmp/a")),
    (timedelta, timedelta(minutes=5)),
    (bytes, b"\x00\xff"),
    (set[int], {1, 2}),
    (tuple[int, ...], (1, 2)),
    (dict[int, UUID], {7: ID}),
    (int | None, None),
    (Annotated[int, msgspec.Meta(ge=0)], 4),
    (float, 1e23),
]


async def test_arguments_and_results_are_converted_to_the_annotated_types(
    app: App, running_worker: RunWorker
) -> None:
    seen: dict[str, Any] = {}
    tasks = []
    for number, (type_, _) in enumerate(VALUES):

        def echo(value, name: str):  # type: ignore[no-untyped-def]
            seen[name] = value
            return value

        echo.__annotations__ |= {"value": type_, "return": type_}
        tasks.append(app.task(name=f"echo-{number}")(echo))
    async with running_worker(app):
        for task, (type_, value) in zip(tasks, VALUES, strict=True):
            result = await (await task.aenqueue(value, task.name)).aresult(120)
            assert (result, type(result)) == (value, type(value)), type_
            assert (seen[task.name], type(seen[task.name])) == (value, type(value)), type_


async def test_every_kind_of_parameter_gets_its_argument(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    def kinds(
        a: int, /, b: int, c: int = 3, *rest: Point, d: Decimal, e: str = "e", **more: date
    ) -> list[Any]:
        assert all(isinstance(each, Point) for each in rest)
        assert all(isinstance(each, date) for each in more.values())
        return [a, b, c, len(rest), str(d), e, sorted(more)]

    day = date(2026, 1, 1)
    handles = [
        await kinds.aenqueue(1, 2, d=Decimal("0.5")),
        await kinds.aenqueue(1, b=2, d=Decimal("0.5"), e="f", x=day, y=day),
        await kinds.aenqueue(1, 2, 4, POINT, POINT, d=Decimal("0.5")),
    ]
    async with running_worker(app):
        results = [await handle.aresult(120) for handle in handles]
    assert results == [
        [1, 2, 3, 0, "0.5", "e", []],
        [1, 2, 3, 0, "0.5", "f", ["x", "y"]],
        [1, 2, 4, 2, "0.5", "e", []],
    ]


async def test_an_annotation_that_cannot_be_resolved_affects_only_its_own_argument(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def half_known(hidden: Hidden, at: datetime, ctx: Context) -> str:
        return f"{hidden} {at.year} {ctx.attempt}"

    assert "an annotation cannot be resolved" in caplog.text
    handle = await half_known.aenqueue("x", NOW)  # type: ignore[call-arg]
    async with running_worker(app):
        assert await handle.aresult(120) == "x 2026 1"


async def test_a_job_enqueued_by_sql_with_invalid_data_fails_without_a_retry(
    app: App, running_worker: RunWorker, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    @app.task(max_attempts=5)
    def strict(x: int, *many: int, **named: int) -> None: ...

    wrong = {
        "[1]": "the data of strict must be an object of its arguments, not list",
        "{}": "strict is missing its argument 'x'",
        '{"x": "1"}': "argument 'x': Expected `int`, got `str`",
        '{"x": 1, "y": 2}': "strict has no argument named 'y'",
        '{"x": 1, "many": 5}': "argument 'many': expected a list, got int",
        '{"x": 1, "many": ["a"]}': "argument 'many': Expected `int`, got `str`",
        '{"x": 1, "named": [1]}': "argument 'named': expected an object, got list",
        '{"x": 1, "named": {"x": 2}}': "argument 'named': 'x' is also a named argument",
    }
    conn = connect()
    ids = [
        conn.execute(
            "SELECT howdah.enqueue_job('strict', %s::text::jsonb, p_max_attempts => 5)", [data]
        ).fetchone()[0]  # type: ignore[index]
        for data in wrong
    ]
    async with running_worker(app):
        jobs = [await ended(await asyncio.to_thread(app.handle, job_id)) for job_id in ids]
    for job, sentence in zip(jobs, wrong.values(), strict=True):
        assert (job.status, job.attempts) == (Status.FAILED, 1)
        assert sentence in (job.last_error or "")


async def test_a_stored_result_that_does_not_fit_the_annotation_is_returned_unconverted(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    async def lies() -> int:
        return "not a number"  # type: ignore[return-value]

    async with running_worker(app):
        assert await (await lies.aenqueue()).aresult(120) == "not a number"


async def test_a_worker_claims_only_the_types_of_its_tasks(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    async def known() -> str:
        return "done"

    stranger = await app.aqueue.enqueue("nobody-knows")
    async with running_worker(app):
        assert await (await known.aenqueue()).aresult(120) == "done"
    job = await app.aqueue.get(stranger)
    assert (job.status, job.claims) == (Status.PENDING, 0)
    with pytest.raises(UnknownTask):
        await asyncio.to_thread(app.handle, stranger)


async def test_two_apps_work_in_one_process(database: str, running_worker: RunWorker) -> None:
    one, two = App(database, schema="queue_one"), App(database, schema="queue two")

    @one.task(name="same")
    async def first() -> str:
        return "one"

    @two.task(name="same")
    def second() -> str:
        return "two"

    async with running_worker(one), running_worker(two):
        assert await (await first.aenqueue()).aresult(120) == "one"
        assert await (await second.aenqueue()).aresult(120) == "two"
    assert (await one.aqueue.counts())[Status.COMPLETED] == 1
    assert (await two.aqueue.counts())[Status.COMPLETED] == 1
    for app in (one, two):
        await app.aclose()


# ── fork ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_app_used_before_a_fork_works_in_the_child_and_in_the_parent(database: str) -> None:
    code = """
        import asyncio, os, sys, threading
        from howdah import App, Worker
        app = App(sys.argv[1])
        @app.task
        def double(x: int) -> int:
            return 2 * x
        def work():
            asyncio.run(Worker(app, concurrency=2).run())
        if sys.argv[2] == "worker":
            work()
        assert double.enqueue(1).result(120) == 2
        later = double.using(delay=3600).enqueue(2)
        changes = later.watch()
        next(changes)
        pid = os.fork()
        if pid == 0:
            assert double.enqueue(3).result(120) == 6
            assert list(double.enqueue(4).watch())[-1].job.result == 8
            os._exit(23)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 23
        assert later.cancel()
        assert list(changes)[-1].status == "cancelled"
        assert double.enqueue(5).result(120) == 10
        print("both work")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), database]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    with subprocess.Popen([*command, "worker"], env=environment) as worker:
        try:
            done = subprocess.run(
                [*command, "web"], env=environment, capture_output=True, text=True, timeout=240
            )
        finally:
            worker.terminate()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both work\n"


# ── types ─────────────────────────────────────────────────────────────────────────────────────────

TYPED = """
from collections.abc import Coroutine
from typing import Any
from howdah import App, Context, Retry, Task, TaskHandle

app = App()

@app.task
def resize(path: str, width: int) -> bytes: ...
@app.task(max_attempts=5, retry=Retry.fixed(1))
async def fetch(ctx: Context, url: str, *, tries: int = 1) -> list[int]: ...
@app.task
def with_context(ctx: Context, x: int) -> str: ...
@app.task
async def bare(x: int) -> float: ...

async def uses() -> None:
    reveal_type(resize.enqueue("a", 1))
    reveal_type(resize.enqueue("a", width=1).result())
    reveal_type(await fetch.aenqueue("u", tries=2))
    reveal_type(await (await fetch.aenqueue("u")).aresult())
    reveal_type(fetch.using(delay=1).run("u"))
    reveal_type(await bare.arun(1))
    reveal_type(resize("a", 1))
    reveal_type(await bare(1))
    reveal_type(await fetch("u"))
    reveal_type(with_context(1))
    reveal_type(resize.enqueue_many([("a", 1)])[0].result())
    resize.enqueue("a", "1")  # E: wrong type
    resize.enqueue("a")  # E: one is missing
    resize.enqueue("a", 1, height=2)  # E: unknown
    await fetch.aenqueue(7)  # E: wrong type
    fetch.enqueue(Context(id=..., job_type=""), "u")  # type: ignore[arg-type]  # E: has no context
    with_context.enqueue("x")  # E: wrong type
    await resize("a", 1)  # E: not a coroutine
    app.task(retries=3)  # E: unknown option
"""


def test_a_type_checker_sees_the_signature_of_the_function(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary",
         "--disable-error-code=empty-body",
         "--cache-dir", str(Path(__file__).parents[1] / ".mypy_cache" / "snippets"), "snippet.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "MYPYPATH": str(Path(__file__).parents[1] / "src")},
    )  # fmt: skip
    said = checked.stdout.splitlines()
    revealed = [line.split('"')[1] for line in said if "Revealed type" in line]
    short = [each.replace("builtins.", "").replace("howdah.task.", "") for each in revealed]
    assert short == [
        "TaskHandle[bytes]",
        "bytes",
        "TaskHandle[list[int]]",
        "list[int]",
        "list[int]",
        "float",
        "bytes",
        "float",
        "list[int]",
        "str",
        "bytes",
    ]
    wrong = {
        number for number, line in enumerate(TYPED.splitlines(), 1) if line.partition("# E:")[1]
    }
    assert {int(line.split(":")[1]) for line in said if ": error:" in line} == wrong, said
