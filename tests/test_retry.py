"""Retry policies: their arithmetic, and how a worker applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah import InvalidOption, Retry, Status
from howdah.retry import to_retry
from waiting import ended, failed_once

if TYPE_CHECKING:
    from conftest import RunWorker
    from howdah import App

ERROR = OSError("torn")
attempts = st.integers(1, 10_000)
seconds = st.floats(0, 999_999_999) | st.integers(0, 999_999_999)


@given(seconds, attempts)
def test_a_fixed_delay_is_always_the_same(delay: float, attempt: int) -> None:
    assert Retry.fixed(delay).seconds(attempt, ERROR) == delay


@given(seconds, seconds, attempts)
def test_a_linear_delay_grows_by_its_step_up_to_its_cap(
    step: float, cap: float, attempt: int
) -> None:
    assert Retry.linear(step, cap=cap).seconds(attempt, ERROR) == float(min(step * attempt, cap))


@given(seconds, seconds, seconds, st.floats(0, 1), attempts)
def test_an_exponential_delay_stays_within_its_jitter_and_its_cap(
    base: float, factor: float, cap: float, jitter: float, attempt: int
) -> None:
    policy = Retry.exponential(base, factor=factor, cap=cap, jitter=jitter)
    delay = policy.seconds(attempt, ERROR)
    assert delay is not None
    assert 0 <= delay <= cap * (1 + jitter) * (1 + 1e-9)
    if attempt == 1:
        middle = min(base, cap)
        assert middle * (1 - jitter) * (1 - 1e-9) <= delay <= middle * (1 + jitter) * (1 + 1e-9)


@given(st.floats(0.001, 100), st.floats(1, 10), st.integers(1, 30))
def test_an_exponential_delay_without_jitter_is_base_times_a_power_of_factor(
    base: float, factor: float, attempt: int
) -> None:
    policy = Retry.exponential(base, factor=factor, cap=1e8, jitter=0)
    assert policy.seconds(attempt, ERROR) == pytest.approx(min(base * factor ** (attempt - 1), 1e8))


def test_jitter_varies_the_delay() -> None:
    policy = Retry.exponential(100, jitter=0.5)
    assert len({policy.seconds(1, ERROR) for _ in range(50)}) > 40


def test_a_policy_may_be_limited_to_some_exceptions_and_exclude_others() -> None:
    policy = Retry.fixed(5, on=OSError, never_on=(FileNotFoundError, PermissionError))
    assert policy.seconds(1, ConnectionError()) == 5
    assert policy.seconds(1, ValueError()) is None
    assert policy.seconds(1, FileNotFoundError()) is None
    assert Retry.never().seconds(1, ERROR) is None
    assert Retry.fixed(5).seconds(1, SystemExit()) == 5


def test_a_callable_is_a_policy() -> None:
    policy = to_retry(lambda attempt, error: None if attempt > 2 else -1)
    assert policy.seconds(1, ERROR) == 0  # never negative
    assert policy.seconds(3, ERROR) is None
    assert to_retry(None).seconds(1, ERROR) == pytest.approx(2, rel=0.26)
    assert to_retry(policy) is policy


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Retry.fixed(-1),
            "seconds is -1; it must be a number of seconds that is not negative.",
        ),
        (
            lambda: Retry.linear(True),
            "step is True; it must be a number of seconds that is not negative.",
        ),
        (lambda: Retry.exponential(jitter=2), "jitter is 2; it must be a fraction, from 0 to 1."),
        (
            lambda: Retry.exponential(cap=float("inf")),
            "cap is inf; it must be a number of seconds that is not negative.",
        ),
        (
            lambda: Retry.fixed(on=["x"]),  # type: ignore[arg-type]
            "on is ['x']; it must be an exception class or a tuple of them.",
        ),
        (lambda: Retry(5), "delay must be a callable (attempt, error) -> seconds or None."),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_policy_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == sentence


async def test_a_worker_schedules_the_retry_after_the_delay_of_the_policy(
    app: App, running_worker: RunWorker
) -> None:
    seen: list[tuple[int, str]] = []

    def policy(attempt: int, error: BaseException) -> float | None:
        seen.append((attempt, str(error)))
        return {1: 0.0, 2: 500.0}[attempt]

    @app.task(retry=policy, max_attempts=5)
    async def fails() -> None:
        raise OSError("torn")

    handle = await fails.aenqueue()
    async with running_worker(app):
        while (job := await failed_once(handle)).attempts < 2 or job.status is not Status.PENDING:
            pass
    assert seen == [(1, "torn"), (2, "torn")]
    assert 480 < (job.run_at - job.created_at).total_seconds() < 560


@pytest.mark.parametrize("delay", [float("inf"), 1e300, "soon"])
async def test_a_job_is_retried_although_its_policy_returns_an_invalid_delay(
    app: App, running_worker: RunWorker, delay: float, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name=f"senseless-{delay}", retry=lambda attempt, error: delay)
    async def fails() -> None:
        raise OSError("torn")

    handle = await fails.aenqueue()
    async with running_worker(app):
        job = await failed_once(handle)
    assert "retry policy failed" in caplog.text
    assert (job.status, job.attempts, job.last_error) == (Status.PENDING, 1, "OSError: torn")


async def test_a_job_fails_permanently_after_an_exception_that_is_not_in_on(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(retry=Retry.linear(0, on=OSError), max_attempts=9)
    def fails(ctx_attempts: int) -> None:
        raise ValueError("of another kind")

    async with running_worker(app):
        job = await ended(await fails.aenqueue(1))
    assert (job.status, job.attempts) == (Status.FAILED, 1)
