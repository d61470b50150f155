"""The figures of one measurement, and the advice that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

BUSY_CORE_SHARE = 0.85  # a process that uses this share of a core is limited by its CPU
MOST_SHARE = 0.5
CALLERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server without load; times in seconds."""

    version: str
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    round_trip: float
    commit: float
    """A durable commit of one row, without the round trip."""

    @property
    def not_durable(self) -> list[str]:
        """The settings that are off, so that a crash may lose acknowledged jobs."""
        names = ("fsync", "full_page_writes", "synchronous_commit")
        return [name for name in names if getattr(self, name) == "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Jobs and the seconds they took; `cpu` is the share of a core that the client process used."""

    jobs: int
    seconds: float
    cpu: float

    @property
    def per_second(self) -> float:
        return self.jobs / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds from the call of enqueue to the start of the handler in an idle worker."""

    samples: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures of one measurement."""

    server: Server
    pick_up: Latency
    one_caller: Rate
    many_callers: Rate
    bulk: Rate
    worker: Rate


def advice(figures: Figures) -> list[str]:
    """A sentence about enqueueing, one about the worker, and a warning if the server is not durable."""
    found = [_enqueue_advice(figures), _worker_advice(figures)]
    if figures.server.not_durable:
        names = " and ".join(figures.server.not_durable)
        found.append(
            f"{names} is off: a crash of the server may lose jobs, and with it on the figures would be "
            "lower. Turn it on where jobs matter."
        )
    return found


def _enqueue_advice(figures: Figures) -> str:
    server, one = figures.server, figures.one_caller
    takes = 1 / one.per_second if one.per_second else float("inf")
    times = (
        f"{_times(figures.many_callers, one)} as many from {CALLERS} concurrent callers, "
        f"{_times(figures.bulk, one)} with enqueue_many"
    )
    if server.round_trip > MOST_SHARE * takes:
        return (
            f"The round trip of {milliseconds(server.round_trip)} is most of an enqueue: enqueue "
            f"concurrently or in bulk ({times}), and keep producers near the database."
        )
    if server.commit > MOST_SHARE * takes:
        return (
            f"The durable commit of {milliseconds(server.commit)} is most of an enqueue: concurrent and "
            f"bulk enqueues share one ({times}); a disk that flushes faster helps all of them."
        )
    if one.cpu > BUSY_CORE_SHARE:
        return (
            f"An enqueue is mostly the producer's own CPU time: enqueue in bulk ({times}), or from more "
            "processes."
        )
    return f"Neither the network nor the disk limits enqueues, but batching still helps: {times}."


def _worker_advice(figures: Figures) -> str:
    worker, share = figures.worker, f"{figures.worker.cpu:.0%} of a core"
    if not worker.jobs:
        return "The worker completed no job in its time; run `howdah doctor` to find the cause."
    if worker.cpu > BUSY_CORE_SHARE:
        return (
            f"The worker process used {share}, so it sets the pace itself: `howdah worker --processes 2` "
            "and more go faster while the server has cores left."
        )
    if figures.server.round_trip > 0.001:
        return (
            f"The worker process used {share} and waited for the rest, not least for round trips: more "
            "processes go faster, and so does a worker nearer to the database."
        )
    return (
        f"The worker process used {share} and waited for the server for the rest: more processes help as "
        "long as the server has cores left."
    )


def _times(rate: Rate, base: Rate) -> str:
    if not base.per_second:
        return "many times"
    ratio = rate.per_second / base.per_second
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:,.0f} times"


def milliseconds(seconds: float) -> str:
    """A short time, with two or three significant digits."""
    value = seconds * 1000
    return (
        f"{value:.2f} ms"
        if value < 10
        else f"{value:,.1f} ms"
        if value < 100
        else f"{value:,.0f} ms"
    )
