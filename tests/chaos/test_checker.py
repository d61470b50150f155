"""The checker on histories of a few lines: each finding, and a similar history without one."""

from __future__ import annotations

from typing import Any

import pytest

from howdah.chaos.checker import Checker, Finding
from howdah.chaos.history import Database, History, Row
from howdah.chaos.ledger import Line

LEASE = 2.0
JOB = "job-1"


class Story:
    """A ledger written by hand, about one job unless others are named."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.rows: list[Row] = []
        self.errors: list[tuple[str, int]] = []
        self.effects: dict[str, int] = {}
        self.reports: set[tuple[str, str]] = set()

    def line(self, t: float, kind: str, pid: int = 10, **fields: Any) -> Story:
        self.lines.append(Line(len(self.lines) + 1, t, pid, kind, fields))
        return self

    def enqueue(self, t: float, *jobs: str, outcome: str = "acknowledged", **more: Any) -> Story:
        described = {"type": "chaos.quick", "queue": "default", "priority": 100, "key": None, "n": None,
                     "delay": None, "max_attempts": 3, "unique": None, **more}  # fmt: skip
        call = f"call-{len(self.lines)}"
        self.line(t, "enqueue-invoked", 1, call=call, jobs=[described | {"tag": j} for j in jobs])
        return self.line(t + 0.1, f"enqueue-{outcome}", 1, call=call, ids=list(jobs))

    def claim(self, t: float, fence: str, pid: int = 10, job: str = JOB, **more: Any) -> Story:
        fields = {"attempt": 1, "most": 3, "claims": 1, "type": "chaos.quick", "queue": "default",
                  "asked": t - 0.1, "durable": False}  # fmt: skip
        return self.line(t, "claim", pid, job=job, fence=fence, **fields | more)

    def work(self, t: float, fence: str, pid: int = 10, job: str = JOB) -> Story:
        self.line(t, "start", pid, job=job, fence=fence, attempt=1)
        return self.line(t + 0.1, "effect", pid, job=job, fence=fence, attempt=1)

    def ack(
        self, t: float, fence: str, pid: int = 10, job: str = JOB,
        what: str = "complete", final: bool = True, answer: str = "accepted",
    ) -> Story:  # fmt: skip
        about = {"job": job, "fence": fence, "what": what, "final": final}
        self.line(t, "ack-invoked", pid, **about)
        return self.line(t + 0.1, f"ack-{answer}", pid, asked=t, **about)

    def row(
        self, status: str = "completed", fence: str | None = "a", job: str = JOB, **more: Any
    ) -> Story:
        fields = {
            "id": job, "seq": 1, "status": status, "job_type": "chaos.quick", "queue": "default",
            "priority": 100, "attempts": 1, "max_attempts": 3, "claims": 1, "lease_id": fence,
            "ordering_key": None, "tag": job, "last_error": None,
        }  # fmt: skip
        self.rows.append(Row(**fields | more))
        return self

    def findings(self) -> list[Finding]:
        database = Database(self.rows, self.errors, self.effects, frozenset(self.reports))
        return Checker(History(self.lines), database, lease=LEASE).check()

    def broken(self) -> list[str]:
        return sorted({finding.promise for finding in self.findings()})


def plain() -> Story:
    """A job that is enqueued, runs and is completed."""
    return Story().enqueue(0, JOB).claim(1, "a").work(1.1, "a").ack(1.3, "a")


def killed(story: Story, at: float, pid: int = 10) -> Story:
    """A worker is killed."""
    story.line(
        at, "fault", 1, fault=at, name="kill worker", scope="worker", phase="begin", target=pid
    )
    story.line(at + 0.1, "exit", 1, child=pid, role="worker", code=-9)
    return story.line(
        at + 0.1, "fault", 1, fault=at, name="kill worker", scope="worker", phase="end", target=pid
    )


def test_a_job_that_runs_once_breaks_no_promise() -> None:
    assert plain().row().findings() == []


def test_a_finding_names_the_job_and_the_ledger_lines() -> None:
    (finding,) = plain().findings()
    assert (finding.promise, finding.job, finding.lines) == ("P1", JOB, (1, 2))
    assert str(finding) == "P1 job-1: was acknowledged and is gone (ledger lines 1, 2)"


def test_an_acknowledged_job_that_never_ends_is_lost_and_a_missing_unacknowledged_one_is_not() -> (
    None
):
    assert Story().enqueue(0, JOB).row("pending", None).broken() == ["P1"]
    assert Story().enqueue(0, JOB, outcome="unknown").broken() == []


def test_two_accepted_ends_under_two_fences_break_p2() -> None:
    story = killed(plain(), 2).claim(5, "b", 11, claims=2).work(5.1, "b", 11).ack(5.3, "b", 11)
    assert story.row(fence="b", attempts=2).broken() == ["P2"]
    again = plain().line(
        1.5, "ack-accepted", 10, job=JOB, fence="a", what="complete", final=True, asked=1.3
    )
    assert again.row().broken() == []  # the same completion, sent again


def test_a_claim_after_the_end_of_a_job_breaks_p2() -> None:
    assert "P2" in plain().claim(9, "b", 11).row().broken()
    assert plain().row().row().broken() == ["P2"]


def test_an_attempt_that_failed_twice_breaks_p2() -> None:
    story = plain().row()
    story.errors = [(JOB, 1), (JOB, 1)]
    assert story.broken() == ["P2"]


def test_two_live_leases_of_one_job_break_p3() -> None:
    story = Story().enqueue(0, JOB).claim(1, "a").claim(2, "b", 11, claims=2)
    story.work(2.1, "b", 11).ack(2.3, "b", 11).row(fence="b")
    assert story.broken() == ["P3"]
    late = killed(Story().enqueue(0, JOB).claim(1, "a"), 1.1).claim(3.5, "b", 11, claims=2)
    assert late.work(3.6, "b", 11).ack(3.8, "b", 11).row(fence="b").broken() == []


@pytest.mark.parametrize(
    ("by", "begin", "end", "early"),
    [
        (3600, 1.5, 9, True),  # ahead: every lease has expired
        (3600, 0.1, 9, False),  # the lease was set after the jump
        (3600, 0.1, 1.5, False),  # a clock that comes back from ahead prolongs leases
        (-3600, 1.5, 9, False),  # so does one that goes back
        (-3600, 0.1, 1.8, True),  # one that comes back from behind jumps ahead
    ],
)
def test_only_a_jump_ahead_of_the_servers_clock_ends_a_lease_early(
    by: int, begin: float, end: float, early: bool
) -> None:
    fault = {"fault": 5, "name": "clock", "scope": "clock", "by": by}
    story = Story().enqueue(0, JOB).line(begin, "fault", 1, phase="begin", **fault)
    story.claim(1, "a").line(1.1, "start", job=JOB, fence="a", attempt=1)
    story.claim(2, "b", 11, claims=2, attempt=2).work(2.1, "b", 11).ack(2.3, "b", 11)
    story.line(end, "fault", 1, phase="end", **fault)
    assert ("P3" not in story.row(fence="b", attempts=2).broken()) is early


def test_two_concurrent_claims_that_both_returned_the_job_break_p3() -> None:
    story = Story().enqueue(0, JOB).claim(1, "a").claim(1.05, "b", 11, claims=2)
    story.work(1.1, "b", 11).ack(1.3, "b", 11).row(fence="b")
    assert story.broken() == ["P3"]
    # One of them may have been committed long before its worker received the reply.
    late = Story().enqueue(0, JOB).claim(5, "a", asked=1.0).claim(4, "b", 11, claims=2)
    assert late.work(4.1, "b", 11).ack(5.3, "b", 11).row(fence="b").broken() == []
    # Or its job may have been released before the other claim was answered.
    released = Story().enqueue(0, JOB).claim(1, "a").ack(1.01, "a", what="release", final=False)
    released.claim(1.05, "b", 11).work(1.1, "b", 11).ack(1.3, "b", 11)
    assert released.row(fence="b").broken() == []


def crash(at: float = 1.1, scope: str = "server", second: float = 2, **claim: Any) -> Story:
    """A job is claimed, a fault hits the server, and the job is claimed again before its lease expires."""
    fault = {"fault": 5, "name": "any fault", "scope": scope}
    story = Story().enqueue(0, JOB).claim(1, "a", durable=claim.pop("durable", False))
    story.line(at, "fault", 1, phase="begin", **fault).line(
        at + 0.4, "fault", 1, phase="end", **fault
    )
    story.claim(second, "b", 11, **claim).work(second + 0.1, "b", 11).ack(second + 0.3, "b", 11)
    return story.row(fence="b")


def test_only_a_crash_between_two_claims_excuses_a_claim_that_was_undone() -> None:
    assert crash().broken() == []
    assert crash(claims=2).broken() == ["P3"]  # the first claim was counted, so it was not undone
    assert crash(durable=True).broken() == ["P3"]  # the claim of a bare queue is durable
    assert crash(scope="connection").broken() == ["P3"]  # only a crash undoes a commit
    assert crash(at=0.2).broken() == ["P3"]  # before the first claim
    assert crash(at=2.1).broken() == ["P3"]  # after the second claim
    calm = Story().enqueue(0, JOB).claim(1, "a").claim(2, "b", 11)
    assert calm.work(2.1, "b", 11).ack(2.3, "b", 11).row(fence="b").broken() == ["P3"]


def test_a_claim_that_was_undone_is_no_lease_for_any_later_claim() -> None:
    """The second claim fails at once, and the third comes before the lease of the first would have expired."""
    fault = {"fault": 5, "name": "any fault", "scope": "server"}
    story = Story().enqueue(0, JOB).claim(1, "a", durable=False)
    story.line(1.1, "fault", 1, phase="begin", **fault).line(1.3, "fault", 1, phase="end", **fault)
    story.claim(1.5, "b", 11).work(1.55, "b", 11).ack(1.6, "b", 11, what="fail", final=False)
    story.claim(2, "c", 11, claims=2, attempt=2).work(2.1, "c", 11).ack(2.3, "c", 11)
    assert story.row(fence="c", attempts=2).broken() == []


@pytest.mark.parametrize(("asked", "broken"), [(1.01, ["P3"]), (0.95, []), (1.05, [])])
def test_a_claim_that_was_flushed_is_not_undone_by_a_crash(asked: float, broken: list[str]) -> None:
    # An enqueue takes 0.1 s here. It flushes the claim if it is sent after the claim's reply and answered before the
    # crash.
    story = crash(at=1.12).enqueue(asked, "job-2")
    story.claim(3, "c", 11, "job-2").work(3.1, "c", 11, "job-2").ack(3.3, "c", 11, "job-2")
    assert story.row(job="job-2", fence="c").broken() == broken


def test_a_late_reply_to_the_first_claim_does_not_make_it_the_second() -> None:
    story = Story().enqueue(0, JOB).claim(4, "b", 11, claims=2, attempt=2).work(4.1, "b", 11)
    story.claim(4.5, "a", asked=1.0)
    assert story.ack(5, "b", 11).row(fence="b", attempts=1).broken() == []


def test_an_extension_lengthens_the_time_in_which_a_lease_is_live() -> None:
    story = killed(Story().enqueue(0, JOB).claim(1, "a"), 4).claim(4.5, "b", 11, claims=2)
    story.work(4.6, "b", 11).ack(4.8, "b", 11).row(fence="b", attempts=2)
    beat = Line(99, 3.1, 10, "beat", {"job": JOB, "fence": "a", "asked": 3.0})
    assert story.broken() == ["P8"]  # one run started, and two attempts were used
    story.lines.append(beat)
    assert story.broken() == ["P3", "P8"]


@pytest.mark.parametrize(("asked", "broken"), [(5.2, ["P3"]), (4.9, [])])
def test_a_write_under_a_stale_fence_breaks_p3_if_it_was_sent_after_the_next_claim(
    asked: float, broken: list[str]
) -> None:
    story = Story().enqueue(0, JOB).claim(1, "a").line(1.1, "start", job=JOB, fence="a", attempt=1)
    pause = {"fault": 1, "name": "pause worker", "scope": "worker", "target": 10}
    story.line(1.2, "fault", 1, phase="begin", **pause).line(4.8, "fault", 1, phase="end", **pause)
    story.claim(5, "b", 11, claims=2, attempt=2).work(5.1, "b", 11)
    story.ack(asked, "a", what="fail", final=False).ack(5.5, "b", 11)
    assert story.row(fence="b", attempts=2).broken() == broken


@pytest.mark.parametrize(
    ("at", "accepted", "broken"), [(6, True, ["P3"]), (6, False, []), (2, True, [])]
)
def test_a_report_of_a_stale_run_breaks_p3_if_it_is_in_the_database(
    at: float, accepted: bool, broken: list[str]
) -> None:
    story = killed(Story().enqueue(0, JOB).claim(1, "a"), 1.5).claim(5, "b", 11, claims=2)
    story.line(at, "report", 10, job=JOB, fence="a", attempt=1)
    story.reports = {(JOB, "a")} if accepted else set()
    story.work(7.1, "b", 11).ack(7.3, "b", 11).row(fence="b")
    assert story.broken() == broken


def test_attempts_over_the_maximum_break_p4() -> None:
    assert "P4" in plain().row(attempts=4).broken()
    assert "P4" in plain().claim(9, "b", attempt=4).row().broken()


def test_an_attempt_used_by_a_claim_without_a_start_breaks_p8() -> None:
    story = killed(Story().enqueue(0, JOB).claim(1, "a"), 1.1).claim(
        4, "b", 11, claims=2, attempt=2
    )
    story.work(4.1, "b", 11).ack(4.3, "b", 11)
    assert story.row(fence="b", attempts=2).broken() == ["P8"]
    # An attempt is given back at most ten times.
    for claims, broken in ((11, ["P8"]), (12, [])):
        story.rows.clear()
        assert story.row(fence="b", attempts=2, claims=claims).broken() == broken


def test_a_released_job_must_not_have_used_an_attempt() -> None:
    story = Story().enqueue(0, JOB).claim(1, "a").ack(1.2, "a", what="release", final=False)
    story.claim(2, "b", 11).work(2.1, "b", 11).ack(2.3, "b", 11)
    assert story.row(fence="b").broken() == []
    story.rows.clear()
    assert story.row(fence="b", attempts=2).broken() == ["P8"]


def test_a_rolled_back_enqueue_whose_job_exists_or_ran_breaks_p5() -> None:
    assert Story().enqueue(0, JOB, outcome="rolled-back").broken() == []
    assert Story().enqueue(0, JOB, outcome="rolled-back").row("pending", None).broken() == ["P5"]
    assert Story().enqueue(0, JOB, outcome="rolled-back").claim(1, "a").broken() == ["P5"]


def test_a_completion_without_its_work_or_before_it_breaks_p6() -> None:
    assert Story().enqueue(0, JOB).claim(1, "a").ack(1.3, "a").row().broken() == ["P6"]
    late = Story().enqueue(0, JOB).claim(1, "a").ack(1.1, "a").work(1.3, "a")
    assert late.row().broken() == ["P6"]


def test_a_second_run_without_a_fault_breaks_p6() -> None:
    story = Story().enqueue(0, JOB).claim(1, "a").line(1.1, "start", job=JOB, fence="a", attempt=1)
    story.claim(5, "b", 11, claims=2, attempt=2).work(5.1, "b", 11).ack(5.3, "b", 11)
    assert story.row(fence="b", attempts=2).broken() == ["P6"]
    assert killed(story, 1.5).broken() == []


@pytest.mark.parametrize(
    ("scope", "seconds", "broken"),
    [("connection", 0.1, []), ("delay", 3, []), ("delay", 0.3, ["P6"]), ("neighbour", 3, ["P6"])],
)
def test_only_a_fault_that_can_expire_a_lease_explains_a_second_run(
    scope: str, seconds: float, broken: list[str]
) -> None:
    fault = {"fault": 5, "name": "any fault", "scope": scope}
    story = Story().enqueue(0, JOB).claim(1, "a").line(1.1, "start", job=JOB, fence="a", attempt=1)
    story.line(1.2, "fault", 1, phase="begin", **fault)
    story.line(1.2 + seconds, "fault", 1, phase="end", **fault)
    story.claim(5, "b", 11, claims=2, attempt=2).work(5.1, "b", 11).ack(5.3, "b", 11)
    assert story.row(fence="b", attempts=2).broken() == broken


def test_a_handler_that_wrote_no_row_or_two_rows_breaks_p6() -> None:
    story = plain().row(job_type="chaos.once")
    assert story.broken() == ["P6"]
    story.effects = {JOB: 1}
    assert story.broken() == []
    story.effects = {JOB: 2}
    assert story.broken() == ["P6"]


def test_one_enqueue_that_created_two_jobs_breaks_p6() -> None:
    story = plain().row().row(job="job-2", tag=JOB, status="pending", fence=None)
    assert story.broken() == ["P6"]


@pytest.mark.parametrize(("second", "broken"), [(1.2, ["P7"]), (1.5, [])])
def test_a_claim_before_the_end_of_the_preceding_job_of_its_key_breaks_p7(
    second: float, broken: list[str]
) -> None:
    story = Story().enqueue(0, JOB, key="k", n=0).enqueue(0.2, "job-2", key="k", n=1)
    story.claim(1, "a").work(1.1, "a").ack(1.3, "a").row()
    story.claim(second, "b", 11, "job-2").work(second + 0.1, "b", 11, "job-2")
    story.ack(second + 0.3, "b", 11, "job-2").row(fence="b", job="job-2")
    assert story.broken() == broken


@pytest.mark.parametrize(
    ("priority", "second", "broken"),
    [(100, 0.5, ["P7"]), (100, 1.5, []), (150, 0.5, []), (30, 0.5, ["P7"])],
)
def test_a_claim_before_a_preceding_job_of_the_same_type_breaks_p7(
    priority: int, second: float, broken: list[str]
) -> None:
    story = Story().enqueue(0, JOB).enqueue(0.2, "job-2", priority=priority)
    story.claim(1, "a").work(1.1, "a").ack(1.3, "a").row()
    story.claim(second, "b", 11, "job-2").work(second + 0.1, "b", 11, "job-2")
    story.ack(second + 0.3, "b", 11, "job-2").row(fence="b", job="job-2")
    assert story.broken() == broken


def test_a_stale_job_that_is_not_recovered_while_a_worker_is_available_breaks_p9() -> None:
    story = killed(plain(), 2).row()
    story.line(9, "overdue", 1, job=JOB, fence="a", seconds=5.5)
    assert story.broken() == []  # no worker was available
    story.line(1, "ready", 1, child=12, role="worker")
    assert story.broken() == ["P9"]
    down = {"fault": 5, "name": "kill server", "scope": "server"}
    story.line(4, "fault", 1, phase="begin", **down).line(6, "fault", 1, phase="end", **down)
    assert story.broken() == []  # the server has been up for three seconds


def test_a_stale_job_that_a_paused_worker_is_acknowledging_need_not_be_recovered() -> None:
    pause = {"fault": 1, "name": "pause worker", "scope": "worker", "target": 10}
    story = Story().enqueue(0, JOB).line(0, "ready", 1, child=12, role="worker").claim(1, "a")
    story.work(1.1, "a").line(1.4, "fault", 1, phase="begin", **pause)
    story.line(9, "overdue", 1, job=JOB, fence="a", seconds=6.0).row()
    assert story.broken() == ["P9"]
    story.line(1.3, "ack-invoked", 10, job=JOB, fence="a", what="complete", final=True)
    assert story.broken() == []
    story.line(3, "fault", 1, phase="end", **pause)
    assert story.broken() == ["P9"]


def due_jobs(*due: int) -> Story:
    """A worker is ready, its only job has ended, and then so many jobs are due, second by second."""
    story = plain().row().line(0, "ready", 1, child=10, role="worker")
    for second, count in enumerate(due, 2):
        story.line(second, "sample", 1, pending=count, due=count, claimed=0, finished=1)
    return story


def test_due_jobs_that_no_worker_claims_break_p9_after_five_seconds() -> None:
    assert due_jobs(3, 3, 3, 3, 3, 3, 3).broken() == ["P9"]
    assert due_jobs(3, 3, 3, 3, 3, 3).broken() == []  # five seconds are allowed
    assert due_jobs(3, 3, 3, 0, 3, 3, 3).broken() == []
    # Another job is claimed in between.
    busy = due_jobs(3, 3, 3, 3, 3, 3, 3).enqueue(0, "job-2").claim(4.5, "c", 10, "job-2")
    busy.work(4.6, "c", 10, "job-2").ack(4.8, "c", 10, "job-2")
    assert busy.row(job="job-2", fence="c").broken() == []


def test_due_jobs_need_not_be_claimed_while_a_fault_keeps_the_workers_from_it() -> None:
    due = (3,) * 7
    gone = due_jobs(*due).line(2.5, "exit", 1, child=10, role="worker", code=0)
    assert gone.broken() == []
    for scope, broken in (("delay", []), ("connection", []), ("neighbour", ["P9"])):
        fault = {"fault": 5, "name": "any fault", "scope": scope}
        story = due_jobs(*due).line(3, "fault", 1, phase="begin", **fault)
        assert story.line(3.5, "fault", 1, phase="end", **fault).broken() == broken
    paused = {"fault": 5, "name": "pause worker", "scope": "worker", "target": 10}
    story = due_jobs(*due).line(3, "fault", 1, phase="begin", **paused)
    assert story.line(4, "fault", 1, phase="end", **paused).broken() == []


def test_a_worker_that_reconnects_later_than_five_seconds_after_the_fault_breaks_p9() -> None:
    cut = {"fault": 5, "name": "cut connections", "scope": "connection"}
    story = plain().row().line(2, "fault", 1, phase="begin", **cut)
    story.line(3, "fault", 1, phase="end", **cut)
    story.line(7.9, "well", 10, asked=2.5, function="claim_job_batch")
    assert story.broken() == []
    story.line(16, "well", 10, asked=10.5, function="claim_job_batch")
    assert story.broken() == ["P9"]


@pytest.mark.parametrize(
    ("function", "claimed", "broken"),
    [("run_due_duty", 69.9, []), ("run_due_duty", 9.9, ["P9"]), ("complete_jobs", 69.9, ["P9"])],
)  # fmt: skip
def test_maintenance_without_a_reply_breaks_nothing_while_claims_get_replies(
    function: str, claimed: float, broken: list[str]
) -> None:
    story = plain().row().line(70, "trouble", 10, asked=10.0, function=function, claimed=claimed)
    story.line(70.1, "well", 10, asked=70.05, function="claim_job_batch")
    assert story.broken() == broken
    # Other failures are reported nevertheless.
    story.line(79, "trouble", 10, asked=72.0, function="claim_job_batch", claimed=71.9)
    story.line(79.1, "well", 10, asked=79.05, function="claim_job_batch")
    assert story.broken() == ["P9"]
