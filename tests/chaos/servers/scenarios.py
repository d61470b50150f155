"""The scenarios with their own servers or extra programs, as far as these programs are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_clock
import pooler
import small_disk
from client_scenarios import CutCommits, RollingUpgrade, Stalls, WrongClocks
from server_scenarios import (
    DiskFull,
    FailOver,
    FailOverByName,
    FailOverWithLoss,
    Neighbours,
    Pooled,
    WalFull,
)

if TYPE_CHECKING:
    from howdah.chaos.scenario import Scenario

SCENARIOS: list[Scenario] = [
    FailOver(), FailOverByName(), FailOverWithLoss(), Neighbours(), CutCommits(), RollingUpgrade(),
    Stalls(),
]  # fmt: skip
MISSING: list[str] = []
"""Why the other scenarios are left out."""

if (reason := small_disk.unavailable_because()) is None:
    SCENARIOS += [DiskFull(), WalFull()]
else:
    MISSING.append(reason)
if pooler.PROGRAM is not None:
    SCENARIOS += [Pooled()]
else:
    MISSING.append(pooler.MISSING)
if fake_clock.library() is not None:
    SCENARIOS += [WrongClocks(fake_clock.HOUR), WrongClocks(-fake_clock.HOUR)]
else:
    MISSING.append(fake_clock.MISSING)
