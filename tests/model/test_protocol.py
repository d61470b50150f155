"""Random walks never leave the protocol. HOWDAH_MODEL_EXAMPLES=5000 takes other and longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis.stateful import run_state_machine_as_test
from machine import SETTINGS, Protocol

if TYPE_CHECKING:
    from system import System


def test_no_walk_leaves_the_protocol(shared_system: System) -> None:
    Protocol.system = shared_system
    run_state_machine_as_test(Protocol, settings=SETTINGS)
