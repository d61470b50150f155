"""Chooses the best settings of a peer for a workload on this machine: a run tries every variant of the peer once, at
a reduced size, and measures with the best one. The tries are stored with the figures. Peers without variants use the
settings in the header of their adapter."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.peers import Peer

TRIED_ON = ("drain-async", "drain-io", "pickup-idle")
# Other workloads that use the settings chosen for one of these. Workloads not listed use the adapter's settings.
SAME_SETTINGS_AS = {
    "steady": "drain-async",
    "payload-100": "drain-async",
    "payload-1000": "drain-async",
    "payload-5000": "drain-async",
    "pickup-commit": "pickup-idle",
    "pickup-loaded": "pickup-idle",
    "pickup-loaded-commit": "pickup-idle",
}


@contextlib.contextmanager
def in_environment(variant: dict[str, str]) -> Iterator[None]:
    """Start adapters with these settings. Variables in the caller's environment take precedence."""
    added = {name: value for name, value in variant.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class AutoTuning:
    """The settings tried and chosen in this run."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[str, str], dict[str, str]] = {}
        self._tried: dict[tuple[str, str], dict[str, float]] = {}

    def tune(self, peer: Peer, workload: str, measure: Callable[[], dict[str, float]]) -> None:
        """Try the peer's variants on this workload, unless it has none or they were tried."""
        if not peer.variants or workload not in TRIED_ON or (peer.name, workload) in self._tried:
            return
        tried: dict[str, float] = {}
        scores: dict[str, float] = {}
        for variant in peer.variants:
            label = format_settings(variant)
            # A variant that fails is not chosen; if all fail, the round itself reports why.
            with in_environment(variant), contextlib.suppress(Exception):
                figures = measure()
                name = "jobs_per_second" if "jobs_per_second" in figures else "call_p50_ms"
                tried[label] = figures[name]
                scores[label] = -figures[name] if name.endswith("_ms") else figures[name]
        self._tried[peer.name, workload] = tried
        if scores:
            best = max(scores, key=lambda label: scores[label])
            chosen = next(variant for variant in peer.variants if format_settings(variant) == best)
            self._chosen[peer.name, workload] = chosen

    def settings(self, peer: Peer, workload: str) -> dict[str, str]:
        """The settings to measure with."""
        return self._chosen.get((peer.name, SAME_SETTINGS_AS.get(workload, workload)), {})

    def facts(self, peer: Peer, workload: str) -> dict[str, object]:
        """What to store with a round."""
        chosen = self.settings(peer, workload)
        if not chosen:
            return {}
        tried = self._tried.get((peer.name, SAME_SETTINGS_AS.get(workload, workload)), {})
        return {"settings": format_settings(chosen), "tried": tried}


def format_settings(variant: dict[str, str]) -> str:
    """Settings as text: `pool threads, threads 10`."""
    names = (name.removeprefix("BENCH_").lower() for name in variant)
    return ", ".join(f"{name} {value}" for name, value in zip(names, variant.values(), strict=True))
