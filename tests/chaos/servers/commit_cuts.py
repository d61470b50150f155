"""A schedule of cuts between "commit" and its answer, and what the database says came of each."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from commit_proxy import CUTS

from children import until
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from commit_proxy import Cut, Round

    from howdah.chaos.scenario import Stage

CALLS = ("enqueue_jobs", "claim_job_batch", "complete_jobs")


class Planned(NamedTuple):
    """A cut to come: how, and how many rounds of its kind are let through before it."""

    cut: Cut
    spared: int


class Made(NamedTuple):
    """A cut that was made."""

    called: str
    cut: Cut
    committed: bool


def schedule(lots: random.Random, each: int) -> dict[str, list[Planned]]:
    """So many cuts of each call: the same for the same seed, whatever else happens meanwhile."""
    return {
        called: [Planned(lots.choice(CUTS), lots.randrange(3)) for _ in range(each)]
        for called in CALLS
    }


class Cutter:
    """The scissors of a gate: cuts by the schedule, one of each call at a time, and decides in the database itself
    whether the round was committed."""

    def __init__(self, url: str, schema: str = "howdah") -> None:
        self._url = url
        self._schema = quote_schema(schema)
        self._left: dict[str, list[Planned]] = {}
        self._stage: Stage | None = None
        self._spared: Counter[str] = Counter()
        self._windows = {called: contextlib.ExitStack() for called in CALLS}
        self._busy = {called: threading.Lock() for called in CALLS}
        self.made: list[Made] = []
        self.empty = 0
        """Cuts of claims that found nothing to claim: there was nothing to commit."""

    def begin(self, planned: Mapping[str, Sequence[Planned]], stage: Stage | None = None) -> None:
        """Make these cuts from now on."""
        self._stage = stage
        self._left = {called: list(reversed(cuts)) for called, cuts in planned.items()}

    def end(self) -> None:
        """Make no more cuts; wait for the last one."""
        self._left = {}
        for busy in self._busy.values():
            with busy:
                pass

    @property
    def is_done(self) -> bool:
        return not any(self._left.values())

    def plan(self, this: Round) -> Cut | None:
        left = self._left.get(this.called)
        if not left or self._busy[this.called].locked():
            return None
        if self._spared[this.called] < left[-1].spared:
            self._spared[this.called] += 1
            return None
        self._busy[this.called].acquire()
        self._spared[this.called] = 0
        return left.pop().cut

    def before(self, this: Round) -> set[Any]:
        if self._stage is not None:
            window = self._stage.fault(f"cut {this.called}", scope="connection")
            self._windows[this.called].enter_context(window)
        return self._facts(this)

    def after(self, this: Round, cut: Cut, before: set[Any]) -> None:
        try:
            until(lambda: not self._lives(this.backend), "the server is done with the connection")
            committed = bool(self._facts(this) - before)
            if this.called == "claim_job_batch" and not committed and cut in ("hasty", "unheard"):
                self.empty += 1
                if this.called in self._left:
                    self._left[this.called].append(Planned(cut, 0))  # again, when there is work
                return
            self.made.append(Made(this.called, cut, committed))
        finally:
            self._windows[this.called].close()
            self._busy[this.called].release()

    def counts(self) -> Counter[tuple[str, bool]]:
        """How many cuts of each call were committed, and how many were not."""
        return Counter((each.called, each.committed) for each in self.made)

    def _lives(self, backend: int) -> bool:
        return bool(self._ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", backend))

    def _facts(self, this: Round) -> set[Any]:
        """What only this round would change: the client that sent it waits for its answer."""
        if this.called == "claim_job_batch":
            return self._ask(
                f"SELECT DISTINCT lease_id FROM {self._schema}.live_jobs WHERE worker_id = %s",
                this.worker_id(),
            )
        table = "jobs" if this.called == "enqueue_jobs" else "finished_jobs"
        return self._ask(f"SELECT id FROM {self._schema}.{table} WHERE id = ANY (%s)", this.ids())

    def _ask(self, query: str, parameter: object) -> set[Any]:
        with psycopg.connect(self._url, autocommit=True) as conn:
            return {row[0] for row in conn.execute(query.encode(), [parameter])}
