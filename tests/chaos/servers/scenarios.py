"""The scenarios with their own servers or extra programs, as far as these programs are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_clock
import pooler
import server_clock
import small_disk
from bare_scenarios import BareKillers
from client_scenarios import CutCommits, RollingUpgrade, Stalls, WrongClocks
from clock_scenarios import ServerClock
from operator_scenarios import OpenCancels
from outage_scenarios import LongOutages
from server_scenarios import (
    DiskFull,
    FailOver,
    FailOverByName,
    FailOverWithLoss,
    Neighbours,
    Pooled,
    WalFull,
)
from strict_scenarios import (
    NO_SYSTEM_POSTGRESQL,
    Refusals,
    StrictSettings,
    StrictSettingsWithJit,
    system_binaries,
)

if TYPE_CHECKING:
    from howdah.chaos.scenario import Scenario

SCENARIOS: list[Scenario] = [
    FailOver(), FailOverByName(), FailOverWithLoss(), Neighbours(), CutCommits(), RollingUpgrade(),
    Stalls(), StrictSettings(), Refusals(), BareKillers(), OpenCancels(), LongOutages(),
]  # fmt: skip
MISSING: dict[str, str] = {}
"""The scenarios that cannot run here, by name, and why."""

if (reason := small_disk.unavailable_because()) is None:
    SCENARIOS += [DiskFull(), WalFull()]
else:
    MISSING |= dict.fromkeys([DiskFull.name, WalFull.name], reason)
if pooler.PROGRAM is not None:
    SCENARIOS += [Pooled()]
else:
    MISSING[Pooled.name] = pooler.MISSING
if fake_clock.library() is not None:
    SCENARIOS += [WrongClocks(fake_clock.HOUR), WrongClocks(-fake_clock.HOUR)]
else:
    MISSING |= dict.fromkeys(["clocks ahead", "clocks behind"], fake_clock.MISSING)
if server_clock.library() is not None:
    SCENARIOS += [ServerClock()]
else:
    MISSING[ServerClock.name] = fake_clock.MISSING
if system_binaries() is not None:
    SCENARIOS += [StrictSettingsWithJit()]
else:
    MISSING[StrictSettingsWithJit.name] = NO_SYSTEM_POSTGRESQL
