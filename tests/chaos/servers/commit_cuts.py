"""A schedule of cuts between a commit and its reply, and whether each cut statement was committed."""

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
    from collections.abc import Mapping, Sequence
    from random import Random

    from commit_proxy import Cut, Round

    from howdah.chaos.scenario import RunContext

CALLS = ("enqueue_jobs", "claim_job_batch", "complete_jobs")


class PlannedCut(NamedTuple):
    """A cut to make, and how many rounds of its call are forwarded before it."""

    cut: Cut
    forwarded: int


class MadeCut(NamedTuple):
    """A cut that was made."""

    called: str
    cut: Cut
    committed: bool


def schedule(random: Random, each: int) -> dict[str, list[PlannedCut]]:
    """So many cuts of each call. They depend on the seed alone."""
    return {
        called: [PlannedCut(random.choice(CUTS), random.randrange(3)) for _ in range(each)]
        for called in CALLS
    }


class CommitCutter:
    """A cut policy: cuts by the schedule, one round of each call at a time, and reads from the database whether the
    round was committed."""

    def __init__(self, url: str, schema: str = "howdah") -> None:
        self._url = url
        self._schema = quote_schema(schema)
        self._left: dict[str, list[PlannedCut]] = {}
        self._run: RunContext | None = None
        self._forwarded: Counter[str] = Counter()
        self._windows = {called: contextlib.ExitStack() for called in CALLS}
        self._busy = {called: threading.Lock() for called in CALLS}
        self.made: list[MadeCut] = []
        self.empty = 0
        """Cuts of claims that found no job: nothing to commit."""

    def begin(
        self, planned: Mapping[str, Sequence[PlannedCut]], run: RunContext | None = None
    ) -> None:
        """Start to make these cuts."""
        self._run = run
        self._left = {called: list(reversed(cuts)) for called, cuts in planned.items()}

    def end(self) -> None:
        """Make no more cuts, and wait for the last one."""
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
        if self._forwarded[this.called] < left[-1].forwarded:
            self._forwarded[this.called] += 1
            return None
        self._busy[this.called].acquire()
        self._forwarded[this.called] = 0
        return left.pop().cut

    def before(self, this: Round) -> set[Any]:
        if self._run is not None:
            window = self._run.fault(f"cut {this.called}", scope="connection")
            self._windows[this.called].enter_context(window)
        return self._state(this)

    def after(self, this: Round, cut: Cut, before: set[Any]) -> None:
        try:
            until(lambda: not self._is_running(this.backend), "the backend exited")
            committed = bool(self._state(this) - before)
            if this.called == "claim_job_batch" and not committed and cut in ("hasty", "unheard"):
                self.empty += 1
                if this.called in self._left:
                    self._left[this.called].append(PlannedCut(cut, 0))  # retry when there are jobs
                return
            self.made.append(MadeCut(this.called, cut, committed))
        finally:
            self._windows[this.called].close()
            self._busy[this.called].release()

    def counts(self) -> Counter[tuple[str, bool]]:
        """The number of cuts by call and by whether the round was committed."""
        return Counter((each.called, each.committed) for each in self.made)

    def _is_running(self, backend: int) -> bool:
        return bool(self._query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", backend))

    def _state(self, this: Round) -> set[Any]:
        """Ids that only this round can change, since its client waits for the reply."""
        if this.called == "claim_job_batch":
            return self._query(
                f"SELECT DISTINCT lease_id FROM {self._schema}.live_jobs WHERE worker_id = %s",
                this.worker_id(),
            )
        table = "jobs" if this.called == "enqueue_jobs" else "finished_jobs"
        return self._query(f"SELECT id FROM {self._schema}.{table} WHERE id = ANY (%s)", this.ids())

    def _query(self, query: str, parameter: object) -> set[Any]:
        with psycopg.connect(self._url, autocommit=True) as conn:
            return {row[0] for row in conn.execute(query.encode(), [parameter])}
