"""Retry policies: when a failed job is retried. No I/O and no clock; the jitter is random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from howdah.errors import InvalidOption

Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]
Delay: TypeAlias = Callable[[int, BaseException], "float | None"]
"""A function (attempt, error) → seconds until the retry, or None for no retry."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry policy: the delay before the next attempt, and the exceptions that are retried.

    `on` are the exceptions to retry, except those in `never_on`. After any other exception the job fails
    permanently. The task's `max_attempts` limits the number of attempts.
    """

    delay: Delay
    on: Errors = (BaseException,)
    never_on: Errors = ()

    def __post_init__(self) -> None:
        if not callable(self.delay):
            raise InvalidOption("delay must be a callable (attempt, error) -> seconds or None.")
        for name, errors in (("on", self.on), ("never_on", self.never_on)):
            each = errors if isinstance(errors, tuple) else (errors,)
            if not all(isinstance(one, type) and issubclass(one, BaseException) for one in each):
                raise InvalidOption(
                    f"{name} is {errors!r}; it must be an exception class or a tuple of them."
                )

    @classmethod
    def fixed(
        cls, seconds: float = 10, *, on: Errors = (BaseException,), never_on: Errors = ()
    ) -> Retry:
        """The same delay before each retry."""
        _check(seconds=seconds)
        return cls(lambda attempt, error: seconds, on, never_on)

    @classmethod
    def linear(
        cls,
        step: float = 10,
        *,
        cap: float = 3600,
        on: Errors = (BaseException,),
        never_on: Errors = (),
    ) -> Retry:
        """A delay that grows by `step` seconds with each retry, up to `cap` seconds."""
        _check(step=step, cap=cap)
        return cls(lambda attempt, error: min(step * attempt, cap), on, never_on)

    @classmethod
    def exponential(
        cls,
        base: float = 2,
        *,
        factor: float = 2,
        cap: float = 3600,
        jitter: float = 0.25,
        on: Errors = (BaseException,),
        never_on: Errors = (),
    ) -> Retry:
        """A delay of `base` seconds that is multiplied by `factor` with each retry, up to `cap`. It varies by
        ± `jitter` of itself, so that jobs that failed together are not retried together."""
        _check(base=base, factor=factor, cap=cap, jitter=jitter)
        if jitter > 1:
            raise InvalidOption(f"jitter is {jitter!r}; it must be a fraction, from 0 to 1.")

        def delay(attempt: int, error: BaseException) -> float:
            try:
                seconds = min(base * float(factor) ** (attempt - 1), cap)
            except OverflowError:
                seconds = cap if base else 0.0
            return seconds * (1 + jitter * (2 * random.random() - 1))  # noqa: S311

        return cls(delay, on, never_on)

    @classmethod
    def never(cls) -> Retry:
        """No retry."""
        return cls(lambda attempt, error: None)

    def seconds(self, attempt: int, error: BaseException) -> float | None:
        """Seconds to wait after this attempt failed with this error, or None for no retry."""
        if not isinstance(error, self.on) or isinstance(error, self.never_on):
            return None
        delay = self.delay(attempt, error)
        return None if delay is None else max(0.0, float(delay))


def to_retry(value: Retry | Delay | None) -> Retry:
    """The policy for `retry=`: a policy, a callable, or None for the default."""
    if value is None:
        return Retry.exponential()
    if isinstance(value, Retry):
        return value
    if callable(value):
        return Retry(value)
    raise InvalidOption(
        f"retry must be a Retry or a callable (attempt, error) -> seconds, not {type(value).__name__}."
    )


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e9:
            raise InvalidOption(
                f"{name} is {number!r}; it must be a number of seconds that is not negative."
            )
