"""Testing what is enqueued and what it does: `inline` without a database, `drain` with a real one, and
assertions for both. The pytest fixtures live in `pytest_howdah`, which imports this only when it is used."""

from howdah.testing.assertions import (
    aassert_enqueued,
    aassert_not_enqueued,
    assert_enqueued,
    assert_not_enqueued,
)
from howdah.testing.draining import DrainResult, adrain, drain
from howdah.testing.inlining import Inline, Log, inline

__all__ = [
    "DrainResult",
    "Inline",
    "Log",
    "aassert_enqueued",
    "aassert_not_enqueued",
    "adrain",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "inline",
]
