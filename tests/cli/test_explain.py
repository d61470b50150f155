"""`howdah explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stage import Run, Shop

    from howdah import JobQueue


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("completed", "completed", "it completed at "),
        ("failed", "failed", ": CardError: declined 2"),
        ("cancelled", "cancelled", "it was cancelled at "),
        ("running", "running", "it runs on worker-1"),
        ("blocked", "key-held", 'the ordering key "alice" is held by job '),
        ("pending", "next", "it is next in line"),
        ("scheduled", "due-later", "it was scheduled: due in "),
        ("misspelt", "unknown-type", 'no live worker has a task named "exprot"; did you mean "export"?'),
    ],
)  # fmt: skip
def test_explain_gives_the_reason_for_each_state(
    run_on_shop: Run, shop: Shop, read_json: Any, name: str, code: str, text: str
) -> None:
    job_id = getattr(shop, name)
    result = run_on_shop("explain", job_id)
    assert result.exit_code == 0
    assert text in result.stdout
    [answer] = read_json(run_on_shop("explain", job_id, "--json"))
    assert answer["id"] == str(job_id)
    assert [reason["code"] for reason in answer["reasons"]] == [code]


def test_explain_names_the_key_holder_the_jobs_before_and_the_estimated_start(
    run_on_shop: Run, shop: Shop, read_json: Any
) -> None:
    assert str(shop.running) in run_on_shop("explain", shop.blocked).stdout
    [answer] = read_json(run_on_shop("explain", shop.misspelt, "--json"))
    assert answer["ahead"] == 2
    [answer] = read_json(run_on_shop("explain", shop.pending, "--json"))
    assert answer["starts_at"] is not None


def test_explain_says_that_no_worker_is_running(run: Run, queue: JobQueue) -> None:
    job = queue.enqueue("work")
    assert "no worker is running; start one with `howdah worker`" in run("explain", job.id).stdout


def test_explain_fits_a_narrow_terminal(terminal: Any, shop: Shop) -> None:
    seen = terminal("explain", shop.misspelt, "--database", shop.url, width=60)
    seen.wait()
    assert "did you mean" in " ".join(seen.text.split())
    assert max(map(len, seen.text.splitlines())) <= 60
