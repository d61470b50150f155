"""Which settings of a peer are the best for a kind of work, here and now: a run tries those that the peer has
variants of, once each and at a part of the size, and measures with the best. What was tried is kept with the
figures. Peers without variants are set up as the headers of their adapters say."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.peers import Peer

TRIED_ON = ("drain-async", "drain-io", "pickup-idle")
# Other kinds of work that are done with the choice for one of these; not named: as the adapter sets it up.
LIKE = {
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
    """Start adapters with these settings. What the caller's environment says goes first."""
    added = {name: value for name, value in variant.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class Choices:
    """What was tried in this run, and what was chosen."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[str, str], dict[str, str]] = {}
        self._tried: dict[tuple[str, str], dict[str, float]] = {}

    def make(self, peer: Peer, workload: str, measure: Callable[[], dict[str, float]]) -> None:
        """Try the peer's variants on this kind of work, unless there is nothing to choose."""
        if not peer.variants or workload not in TRIED_ON or (peer.name, workload) in self._tried:
            return
        tried: dict[str, float] = {}
        worth: dict[str, float] = {}
        for variant in peer.variants:
            label = told(variant)
            # One that breaks is not the best; if all do, the round itself will say why.
            with in_environment(variant), contextlib.suppress(Exception):
                figures = measure()
                name = "jobs_per_second" if "jobs_per_second" in figures else "call_p50_ms"
                tried[label] = figures[name]
                worth[label] = -figures[name] if name.endswith("_ms") else figures[name]
        self._tried[peer.name, workload] = tried
        if worth:
            best = max(worth, key=lambda label: worth[label])
            chosen = next(variant for variant in peer.variants if told(variant) == best)
            self._chosen[peer.name, workload] = chosen

    def of(self, peer: Peer, workload: str) -> dict[str, str]:
        """The settings to measure with."""
        return self._chosen.get((peer.name, LIKE.get(workload, workload)), {})

    def facts(self, peer: Peer, workload: str) -> dict[str, object]:
        """What to keep with a round."""
        chosen = self.of(peer, workload)
        if not chosen:
            return {}
        tried = self._tried.get((peer.name, LIKE.get(workload, workload)), {})
        return {"settings": told(chosen), "tried": tried}


def told(variant: dict[str, str]) -> str:
    """Settings in words: `pool threads, threads 10`."""
    names = (name.removeprefix("BENCH_").lower() for name in variant)
    return ", ".join(f"{name} {value}" for name, value in zip(names, variant.values(), strict=True))
