"""Ids, statuses and the defaults of a new job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from howdah import BACKFILL, DISCOVERED, EXPLICIT, NewJob, Status
from howdah.model import new_id


def test_ids_are_uuids_of_version_7_and_increase_within_a_process() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {each.version for each in ids} == {7}
    assert {each.variant for each in ids} == {"specified in RFC 4122"}


def test_ids_of_many_threads_are_all_different() -> None:
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(lambda _: [new_id() for _ in range(2_000)], range(8)))
    assert len({each for batch in batches for each in batch}) == 16_000
    assert all(batch == sorted(batch) for batch in batches)


def test_ids_increase_even_if_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_id()
    monkeypatch.setattr("howdah.model.time.time_ns", lambda: 0)
    assert new_id() > before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_other_ids_than_its_parent() -> None:
    new_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, new_id().bytes)
        os._exit(0)
    mine = new_id().bytes
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 16) != mine
    os.close(reader)


def test_only_completed_failed_and_cancelled_are_final() -> None:
    final = {status for status in Status if status.is_final}
    assert final == {Status.COMPLETED, Status.FAILED, Status.CANCELLED}


def test_explicit_is_above_discovered_and_backfill_is_below() -> None:
    assert EXPLICIT > DISCOVERED > BACKFILL


def test_a_new_job_needs_nothing_but_its_type() -> None:
    job = NewJob(job_type="work")
    assert (job.data, job.priority, job.queue, job.max_attempts) == ({}, 100, "default", 3)
