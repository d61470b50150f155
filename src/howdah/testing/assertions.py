"""Assertions about enqueued jobs: in the database, in an open transaction, or in an inline block.

A job matches if every given argument is equal, compared as JSON. An argument that the caller omits matches any
value. Options bound with `using` must be equal too; its `conn` is the connection to search on."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from howdah.encoding import payload, validation
from howdah.encoding.arguments import to_json
from howdah.errors import InvalidJob, InvalidOption, did_you_mean
from howdah.protocol.filters import Filters
from howdah.testing.inline_backend import inline_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from howdah.model import Job
    from howdah.protocol.statements import Statement
    from howdah.task import Task

SHOWN_JOBS = 10
SEARCHED_JOBS = 10_000
# The delay of a job is run_at - created_at, for which the clock is read at different times.
DELAY_TOLERANCE = timedelta(seconds=1)
_COMPARED = (
    "queue", "priority", "max_attempts", "run_at", "delay", "keep", "idempotency_key",
    "ordering_key", "request_id", "traceparent",
)  # fmt: skip


def assert_enqueued(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> list[Job]:
    """Assert that a job of the task with these arguments exists: pending, running or finished.

    `assert_enqueued(resize.using(priority=150, conn=session), "a.png")` also compares the priority, and
    searches in the open transaction of the session. Returns the matching jobs, oldest first."""
    return _check(task, _jobs(task), args, kwargs)


def assert_not_enqueued(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Assert that no job of the task with these arguments exists. Without arguments: no job of the task."""
    _check_none(task, _jobs(task), args, kwargs)


async def aassert_enqueued(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> list[Job]:
    """`assert_enqueued`, awaited, for the connections that `aenqueue` accepts."""
    return _check(task, await _ajobs(task), args, kwargs)


async def aassert_not_enqueued(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """`assert_not_enqueued`, awaited."""
    _check_none(task, await _ajobs(task), args, kwargs)


# ── searching ─────────────────────────────────────────────────────────────────────────────────────


def _statement(task: Task[..., Any]) -> Statement[list[Job]]:
    return task.app.statements.find(Filters(), SEARCHED_JOBS)


def _jobs(task: Task[..., Any]) -> list[Job]:
    jobs = inline_jobs(task.app)
    if jobs is not None:
        return jobs
    found: list[Job] = task.app.backend.run(_statement(task), task._call.get("conn"))
    return found[::-1]


async def _ajobs(task: Task[..., Any]) -> list[Job]:
    if inline_jobs(task.app) is not None:
        return _jobs(task)
    return (await task.app.abackend.run(_statement(task), task._call.get("conn")))[::-1]


# ── matching ──────────────────────────────────────────────────────────────────────────────────────


def _check(
    task: Task[..., Any], jobs: list[Job], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Job]:
    wanted = _wanted(task, args, kwargs)
    matching = [
        job for job in jobs if job.job_type == task.name and not _differences(task, job, wanted)
    ]
    if not matching:
        raise AssertionError(_explain(task, jobs, wanted))
    return matching


def _check_none(
    task: Task[..., Any], jobs: list[Job], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    wanted = _wanted(task, args, kwargs)
    matching = [
        job for job in jobs if job.job_type == task.name and not _differences(task, job, wanted)
    ]
    if matching:
        lines = [f"  {_show(job)}" for job in matching[:SHOWN_JOBS]]
        raise AssertionError("\n".join([f"{task.name} was enqueued{_with(wanted)}:", *lines]))


def _wanted(
    task: Task[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The values to compare: arguments by name, options as `using …`."""
    try:
        bound = task.arguments.signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InvalidJob(f"{task.name}{task.arguments.signature}: {error}.", field="data") from None
    wanted = {name: _json(value, name) for name, value in bound.arguments.items()}
    for name, value in task._call.items():
        if name == "conn":
            continue
        if name not in _COMPARED:
            raise InvalidOption(f"assert_enqueued cannot compare the option {name}; omit it.")
        wanted[f"using {name}"] = (
            validation.to_timedelta(value, name) if name in ("delay", "keep") else value
        )
    return wanted


def _differences(task: Task[..., Any], job: Job, wanted: Mapping[str, Any]) -> list[str]:
    """The names of the values that differ in a job."""
    return [name for name, value in wanted.items() if not _equal(value, _found(task, job, name))]


def _found(task: Task[..., Any], job: Job, name: str) -> Any:
    option = name.removeprefix("using ")
    if option == name:
        data = job.data if isinstance(job.data, dict) else {}
        if name in data:
            return data[name]
        default = task.arguments.signature.parameters[name].default
        try:
            return _json(default, name)
        except InvalidJob:
            return default
    return job.run_at - job.created_at if option == "delay" else getattr(job, option)


def _equal(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, timedelta) and isinstance(found, timedelta):
        return abs(wanted - found) <= DELAY_TOLERANCE
    return bool(wanted == found)


def _json(value: Any, name: str) -> Any:
    return payload.decode(bytes(memoryview(payload.encode_data(to_json(value, name)))).decode())


# ── the message ───────────────────────────────────────────────────────────────────────────────────


def _explain(task: Task[..., Any], jobs: list[Job], wanted: Mapping[str, Any]) -> str:
    message = f"{task.name} was not enqueued{_with(wanted)}."
    own = [job for job in jobs if job.job_type == task.name]
    if not own:
        others = Counter(job.job_type for job in jobs)
        listed = ", ".join(f"{name} ({n})" for name, n in others.most_common(SHOWN_JOBS))
        hint = did_you_mean(task.name, others).removeprefix("; ").capitalize()
        return f"{message} Enqueued are: {listed or 'no jobs at all'}. {hint}".strip()
    nearest = min(own, key=lambda job: len(_differences(task, job, wanted)))
    differences = ", ".join(
        f"{name.removeprefix('using ')} is {_found(task, nearest, name)!r}"
        for name in _differences(task, nearest, wanted)
    )
    lines = [f"  {_show(job)}" for job in own[:SHOWN_JOBS]]
    if len(own) > SHOWN_JOBS:
        lines.append(f"  … and {len(own) - SHOWN_JOBS} more")
    hint = f"Did you mean {_show(nearest)}? There {differences}."
    return "\n".join([message, f"Jobs of {task.name} are:", *lines, hint])


def _with(wanted: Mapping[str, Any]) -> str:
    return f" with {_pairs(wanted)}" if wanted else ""


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('using ')}={value!r}" for name, value in values.items())


def _show(job: Job) -> str:
    arguments = _pairs(job.data) if isinstance(job.data, dict) else repr(job.data)
    return (
        f"{job.job_type}({arguments}), {job.status}, queue={job.queue!r}, priority={job.priority}"
    )
