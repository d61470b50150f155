"""Tools for the tests of applications: `inline` runs tasks without a database, `drain` runs pending jobs of a real
one, and the assertions work with both. The pytest fixtures are in `pytest_howdah`, which imports this package
only when a test uses them."""

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
