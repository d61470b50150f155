"""Measures a user's database in a temporary schema, and derives advice from the figures. `howdah bench` shows them.
The benchmarks against other queues are in `bench/`, outside the package."""

from howdah.bench.figures import Figures, Latency, Rate, Server, advice
from howdah.bench.measure import STEPS, Bench, Progress
from howdah.bench.temporary_schema import temporary_schema

__all__ = [
    "STEPS",
    "Bench",
    "Figures",
    "Latency",
    "Progress",
    "Rate",
    "Server",
    "advice",
    "temporary_schema",
]
