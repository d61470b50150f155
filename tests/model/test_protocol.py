"""Random walks find no violation. HOWDAH_MODEL_EXAMPLES=5000 tries 5,000 other walks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis.stateful import run_state_machine_as_test
from machine import SETTINGS, Protocol

if TYPE_CHECKING:
    from system import System


def test_random_walks_find_no_violation(shared_system: System) -> None:
    Protocol.system = shared_system
    run_state_machine_as_test(Protocol, settings=SETTINGS)
