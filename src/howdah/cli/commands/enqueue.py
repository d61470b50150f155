"""`howdah enqueue`: enqueues a call of a task, or a bare job."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from howdah.app import App
from howdah.cli.commands.watch import wait_for
from howdah.cli.load import load_app
from howdah.cli.options import database_options, json_lines_option
from howdah.cli.output import Output
from howdah.cli.session import open_session
from howdah.cli.values import Duration, Misuse, Name, parse_arguments
from howdah.errors import InvalidJob, InvalidOption, did_you_mean
from howdah.queue import JobQueue
from howdah.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from howdah.database.connection import Connection
    from howdah.model import Handle


@click.command("enqueue", short_help="Enqueue a call of a task, or a bare job.")
@click.argument("words", metavar="[MODULE:TASK] [KEY=VALUE]...", nargs=-1)
@click.option("--type", "job_type", type=Name(), metavar="NAME",
              help="Enqueue a bare job of this type instead of a task.")  # fmt: skip
@click.option(
    "--data", metavar="JSON", help="The arguments as a JSON object; KEY=VALUE adds to it."
)
@click.option(
    "--delay", type=Duration(), metavar="DURATION", help="Run after this delay, as in 30s, 5m, 2h."
)
@click.option("--priority", type=click.IntRange(-1000, 1000), help="Higher runs first.")
@click.option("--queue", type=Name(), metavar="NAME", help="The queue.")
@click.option("--key", type=Name(), metavar="TEXT",
              help="Idempotency key: a second enqueue with it returns the first job.")  # fmt: skip
@click.option("--ordering-key", type=Name(), metavar="TEXT",
              help="Jobs with the same ordering key run one at a time, in order.")  # fmt: skip
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the job ends and print its result. The exit code is 5 if it failed or was cancelled.",
)
@click.option(
    "--timeout", type=Duration(), metavar="DURATION", help="With --wait: how long to wait."
)
@database_options
@json_lines_option
def enqueue_command(
    words: tuple[str, ...],
    job_type: str | None,
    data: str | None,
    wait: bool,
    timeout: timedelta | None,
    database: str | None,
    schema: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Enqueue a call of a task, named as MODULE:TASK, and print the job's id.

    A value is parsed as JSON if possible, and is a string otherwise: width=400 is a number, path=a.png is
    a string. The arguments are checked against the task's signature. The first enqueue creates the schema.

    \b
      howdah enqueue shop:resize path=a.png width=400 --wait
      howdah enqueue --type send-email to=alice@example.com --delay 5m
    """
    if timeout is not None and not wait:
        raise Misuse("--timeout needs --wait.")
    output = Output(as_json=as_json)
    options["idempotency_key"] = options.pop("key")
    given = {name: value for name, value in options.items() if value is not None}
    task: Task[..., Any] | None = None
    if job_type is None:
        if not words or "=" in words[0]:
            raise Misuse("name a task as MODULE:TASK, or a bare job type with --type.")
        task, words = find_task(words[0]), words[1:]
        database = database or task.app.database
        source = click.get_current_context().get_parameter_source("schema")
        if source is click.core.ParameterSource.DEFAULT:
            schema = task.app.schema
    payload, words_of = _payload(data, words)
    with open_session(database, schema, create=True) as session:
        try:
            with session.translated_errors():
                if task is None:
                    handle = _enqueue_bare(session.conn, schema, job_type or "", payload, given)
                else:
                    handle = _enqueue_call(session.conn, task, payload, words_of, given)
        except (InvalidJob, InvalidOption) as error:
            raise Misuse(str(error)) from None
        if as_json:
            output.json({"id": handle.id, "is_new": handle.is_new})
        else:
            output.line(str(handle.id))
            if not handle.is_new:
                output.note("A job with this key was enqueued before; this is its id.")
        if wait:
            wait_for(session, output, handle.id, timeout)


def _payload(data: str | None, words: Sequence[str]) -> tuple[Any, dict[str, str]]:
    values, words_of = parse_arguments(words)
    if data is None:
        return values, words_of
    try:
        payload = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"--data is not JSON: {error}.") from None
    if not values:
        return payload, words_of
    if not isinstance(payload, dict):
        raise Misuse("--data must be a JSON object if KEY=VALUE arguments are given too.")
    return payload | values, words_of


def _enqueue_bare(
    conn: Connection,
    schema: str,
    job_type: str,
    payload: Any,
    options: Mapping[str, Any],
) -> Handle:
    # On the session's connection: the queue opens none.
    return JobQueue("postgresql://", schema=schema, create=False).enqueue(
        job_type, payload, conn=conn, **options
    )


def _enqueue_call(
    conn: Connection,
    task: Task[..., Any],
    payload: Any,
    words_of: Mapping[str, str],
    options: Mapping[str, Any],
) -> Handle:
    if not isinstance(payload, dict):
        raise Misuse("--data must be a JSON object of the task's arguments.")
    arguments = {
        name: _fitting(task.arguments.types.get(name, Any), value, words_of.get(name))
        for name, value in payload.items()
    }
    return task.using(conn=conn, **options).enqueue(**arguments)


def _fitting(type_: Any, value: Any, word: str | None) -> Any:
    """The parsed value, or the unparsed word if only that fits the argument's type."""
    if word is None or isinstance(value, str):
        return value
    for each in (value, word):
        try:
            msgspec.convert(each, type_, str_keys=True)
        except Exception:  # noqa: S112 - a user's type may raise anything; the signature check reports it
            continue
        return each
    return value


def find_task(name: str) -> Task[..., Any]:
    """The task that MODULE:TASK or MODULE:APP:TASK names."""
    module_name, _, rest = name.partition(":")
    app_name, separator, task_name = rest.partition(":")
    try:
        if separator:
            return _task_of(
                load_app(f"{module_name}:{app_name}"), task_name, f"{module_name}:{app_name}"
            )
        app = load_app(name)
    except InvalidOption as error:
        module = sys.modules.get(module_name)
        if module is None or separator or not rest:
            raise Misuse(str(error)) from None
    else:
        names = ", ".join(f"{module_name}:{each}" for each in list(app.tasks)[:5])
        raise Misuse(
            f'"{name}" is an app; name one of its tasks: {names or "the app has no tasks"}.'
        )
    found = getattr(module, rest, None)
    if isinstance(found, Task):
        return found
    apps = {id(each): each for each in vars(module).values() if isinstance(each, App)}
    for app in apps.values():
        if rest in app.tasks:
            return app.tasks[rest]
    known = [key for key, value in vars(module).items() if isinstance(value, Task)]
    known += [key for app in apps.values() for key in app.tasks]
    raise Misuse(
        f'module "{module_name}" has no task named "{rest}"{did_you_mean(rest, known) or "."}'
    )


def _task_of(app: App, name: str, where: str) -> Task[..., Any]:
    if name in app.tasks:
        return app.tasks[name]
    raise Misuse(f'{where} has no task named "{name}"{did_you_mean(name, app.tasks) or "."}')
