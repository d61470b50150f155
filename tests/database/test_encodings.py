"""Databases, roles and connections with another encoding than UTF8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import psycopg_pool
import pytest
from click.testing import CliRunner

from blocking import BlockingAsyncJobQueue
from howdah import InvalidJob, InvalidOption, JobQueue, Status
from howdah.cli import main
from howdah.insight.doctor import Doctor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from databases import Databases

QUEUES = [JobQueue, BlockingAsyncJobQueue]
DATABASES = ["SQL_ASCII", "LATIN1", "UTF8"]
LATIN = "caf\u00e9"
EURO = "5 \u20ac"


@pytest.fixture
def make_encoded(databases: Databases) -> Iterator[Callable[[str], str]]:
    """Creates databases with an encoding. The one with UTF8 has another default for its clients."""
    created = []

    def create(encoding: str) -> str:
        name = f"encoded_{encoding.lower()}"
        with psycopg.connect(databases.url("postgres"), autocommit=True) as conn:
            conn.execute(
                f"CREATE DATABASE {name} ENCODING {encoding} LOCALE 'C' TEMPLATE template0".encode()
            )
            created.append(name)
            if encoding == "UTF8":
                conn.execute(f"ALTER DATABASE {name} SET client_encoding = latin1".encode())
        return databases.url(name)

    yield create
    for name in created:
        databases.drop(name)


@pytest.mark.parametrize("queue_class", QUEUES)
@pytest.mark.parametrize("encoding", DATABASES)
def test_a_queue_works_in_every_encoding(
    make_encoded: Callable[[str], str], queue_class: Any, encoding: str
) -> None:
    queue = queue_class(make_encoded(encoding))
    handle = queue.enqueue("work", {"text": LATIN}, ordering_key=LATIN)
    queue.enqueue_many([("work", {"text": LATIN})] * 200)
    job = queue.get(handle)
    assert (job.job_type, job.data, job.ordering_key) == ("work", {"text": LATIN}, LATIN)
    claimed = queue.claim_one(["work"])
    assert claimed.data == {"text": LATIN}
    queue.fail(claimed, reason=LATIN, retry=False)
    assert queue.get(claimed.id).last_error == LATIN
    assert queue.counts()[Status.PENDING] == 200
    queue.close()


@pytest.mark.parametrize(
    "command", ["jobs", "queues", "doctor", "explain", "show", "migrate --check"]
)
@pytest.mark.parametrize("encoding", DATABASES)
def test_a_command_works_in_every_encoding(
    make_encoded: Callable[[str], str], encoding: str, command: str
) -> None:
    url = make_encoded(encoding)
    queue = JobQueue(url)
    handle = queue.enqueue("work", {"text": LATIN}, request_id=LATIN)
    queue.close()
    arguments = command.split()
    if command in ("explain", "show"):
        arguments.append(str(handle.id))
    answer = CliRunner().invoke(main, arguments, env={"DATABASE_URL": url})
    assert answer.exception is None or isinstance(answer.exception, SystemExit)
    assert "b'" not in answer.output
    assert "check failed" not in answer.output
    if command in ("jobs", "show"):
        assert "work" in answer.output
        assert LATIN in answer.output or command == "jobs"


@pytest.mark.parametrize("queue_class", QUEUES)
def test_the_database_may_use_text_that_the_default_of_its_clients_lacks(
    make_encoded: Callable[[str], str], queue_class: Any
) -> None:
    queue = queue_class(make_encoded("UTF8"))
    queue.enqueue("work", {"text": EURO}, ordering_key=EURO)
    assert queue.claim_one(["work"]).data == {"text": EURO}
    queue.close()


@pytest.mark.parametrize("queue_class", QUEUES)
@pytest.mark.parametrize("count", [1, 300])
def test_text_that_the_database_cannot_store_is_refused_in_words(
    make_encoded: Callable[[str], str], queue_class: Any, count: int
) -> None:
    queue = queue_class(make_encoded("LATIN1"))
    with pytest.raises(InvalidJob, match='no equivalent in encoding "LATIN1"'):
        queue.enqueue_many([("work", {"text": EURO})] * count)
    queue.enqueue("work", {"text": LATIN})
    queue.close()


def test_text_that_the_callers_connection_cannot_send_is_refused_in_words(
    fresh_database: str,
) -> None:
    queue = JobQueue(fresh_database)
    with psycopg.connect(fresh_database, client_encoding="latin1") as conn:
        queue.enqueue("work", {"text": LATIN}, conn=conn)
        with pytest.raises(InvalidOption, match=r"client_encoding of your connection is .*UTF8"):
            queue.enqueue("work", {"text": EURO}, conn=conn)
        conn.commit()
    assert queue.claim_one(["work"]).data == {"text": LATIN}
    queue.close()


def test_text_that_the_callers_pool_cannot_send_is_refused_in_words(fresh_database: str) -> None:
    options = {"client_encoding": "latin1"}
    with psycopg_pool.ConnectionPool(fresh_database, kwargs=options, open=True) as pool:
        queue = JobQueue(pool)
        queue.enqueue("work", {"text": LATIN})
        with pytest.raises(InvalidOption, match=r"client_encoding of your connection is .*UTF8"):
            queue.enqueue("work", {"text": EURO})
        with pytest.raises(InvalidOption, match=r"client_encoding of your connection is .*UTF8"):
            queue.enqueue_many([{"job_type": "work", "ordering_key": EURO}] * 300)
        assert queue.claim_one(["work"]).data == {"text": LATIN}


@pytest.mark.parametrize(("encoding", "level"), [("LATIN1", "warning"), ("UTF8", "ok")])
def test_the_doctor_warns_of_an_encoding_other_than_utf8(
    make_encoded: Callable[[str], str], encoding: str, level: str
) -> None:
    url = make_encoded(encoding)
    queue = JobQueue(url)
    queue.pending()
    queue.close()
    with psycopg.connect(url, autocommit=True) as conn:
        findings = {finding.check: finding for finding in Doctor(conn, "howdah").examine()}
    assert findings["encoding"].level == level
    assert encoding in findings["encoding"].text
