"""A handler that adds more events than can be written at once harms neither its neighbours nor itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from howdah import Context, DatabaseUnreachable, Status, TooManyEvents
from howdah.database.store import Store
from howdah.execution import event_buffer
from waiting import ended, eventually

if TYPE_CHECKING:
    from conftest import RunWorker
    from howdah import App


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The ids and the data of each statement that adds events."""
    statements: list[list[Any]] = []
    run_all = Store.run_all

    def note(store: Store, given: Any) -> Any:
        if isinstance(given, list):
            statements.extend(
                [each.parameters[0], each.parameters[3]]
                for each in given
                if each.operation == "add_events"
            )
        return run_all(store, given)

    monkeypatch.setattr(Store, "run_all", note)
    return statements


async def test_many_events_are_written_once_each_in_bounded_statements(
    app: App, running_worker: RunWorker, sent: list[list[Any]]
) -> None:
    @app.task(max_attempts=1)
    def flood(ctx: Context) -> None:
        for number in range(2500):
            ctx.event("few", {"n": number})
        for number in range(2500, 2600):
            ctx.event("large", {"n": number, "text": "x" * 50_000})

    handle = await flood.aenqueue()
    async with running_worker(app):
        await handle.aresult(120)
    events = await app.aqueue.events(handle)
    assert [event.data["n"] for event in events] == list(range(2600))
    assert max(len(ids) for ids, _ in sent) <= event_buffer.MAX_EVENTS
    assert max(sum(map(len, datas)) for _, datas in sent) <= event_buffer.MAX_BYTES + 60_000


async def test_the_events_and_the_outcome_of_a_neighbour_do_not_wait_for_a_flood(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statements of the flood are never answered in time."""
    flooding: set[Any] = set()
    run_all = Store.run_all

    def fail(store: Store, given: Any) -> Any:
        if isinstance(given, list) and given[0].operation == "add_events":
            assert isinstance(given[0].parameters[0], list)
            if flooding.issuperset(given[0].parameters[0]):
                raise_timeout()
        return run_all(store, given)

    monkeypatch.setattr(Store, "run_all", fail)

    @app.task(max_attempts=1)
    def flood(ctx: Context) -> None:
        flooding.add(ctx.id)
        for number in range(3000):
            ctx.event("n", {"n": number})

    @app.task
    def neighbour(ctx: Context) -> int:
        ctx.log("hello")
        return 1

    @app.task
    async def plain() -> int:
        return 2

    flood_handle = await flood.aenqueue()
    async with running_worker(app):
        await eventually(lambda: flooding, "the flood has begun")
        assert await (await plain.aenqueue()).aresult(60) == 2
        assert await (await neighbour.aenqueue()).aresult(60) == 1
        assert not (await flood_handle.ajob()).status.is_final
        flooding.clear()
        await flood_handle.aresult(120)
    assert len(await app.aqueue.events(flood_handle)) == 3000


def raise_timeout() -> None:
    from howdah import DatabaseTimeout

    raise DatabaseTimeout("here", "there", "no answer within 4 s")


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_a_handler_with_too_many_events_waits_until_some_are_written(
    module_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setattr(event_buffer, "FULL_EVENTS", 100)
    most = 0
    add = event_buffer.EventBuffer.add

    def note(buffer: Any, run: Any, kind: str, data: str) -> None:
        nonlocal most
        add(buffer, run, kind, data)
        most = max(most, len(buffer._runs[run].events))

    monkeypatch.setattr(event_buffer.EventBuffer, "add", note)
    handle = await module_app.tasks[f"{executor}:flood"].aenqueue(3000)
    async with running_worker(module_app):
        await handle.aresult(120)
    assert len(await module_app.aqueue.events(handle)) == 3000
    assert most <= (100 if executor == "thread" else 600)


async def test_an_async_handler_with_far_too_many_events_is_told_so(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_buffer, "FULL_EVENTS", 10)
    raised = asyncio.Event()

    @app.task(max_attempts=1)
    async def flood(ctx: Context) -> int:
        written = 0
        try:
            for _ in range(1000):
                ctx.log("line")
                written += 1
        except TooManyEvents:
            raised.set()
        return written

    handle = await flood.aenqueue()
    async with running_worker(app):
        written = await handle.aresult(120)
    assert raised.is_set()
    assert len(await app.aqueue.events(handle)) == written >= 100


# ── a lost answer ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("completes_by_itself", [False, True])
async def test_events_whose_answer_was_lost_are_written_once(
    app: App,
    running_worker: RunWorker,
    monkeypatch: pytest.MonkeyPatch,
    database: str,
    completes_by_itself: bool,
) -> None:
    lost: list[int] = []
    run_all = Store.run_all

    def lose(store: Store, given: Any) -> Any:
        answer = run_all(store, given)
        if (
            isinstance(given, list)
            and "_events" in given[0].operation
            and answer[0]
            and len(lost) < 4
        ):
            lost.append(len(answer[0]))
            if len(lost) % 2:
                raise_timeout()  # it is divided, and sent with newer events
            raise DatabaseUnreachable("here", "there", "the connection broke")
        return answer

    monkeypatch.setattr(Store, "run_all", lose)

    @app.task(max_attempts=1)
    def reports(ctx: Context) -> None:
        for number in range(300):
            ctx.event("n", {"n": number})
        if completes_by_itself:
            with psycopg.connect(database) as conn:
                app.queue.complete(ctx.completion(), conn=conn)
        for number in range(300, 400):
            ctx.event("n", {"n": number})

    handle = await reports.aenqueue()
    async with running_worker(app):
        job = await ended(handle)
        await eventually(lambda: len(lost) == 4)
    numbers = [event.data["n"] for event in await app.aqueue.events(handle)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) == (await handle.ajob()).events_count == 400
    assert job.status == Status.COMPLETED
