"""Measures a user's own database in a schema of its own, and says what the figures mean. `howdah bench`
draws it; the benchmarks against other queues are another thing, and live outside the package."""

from howdah.bench.figures import Figures, Latency, Rate, Server, advice
from howdah.bench.measure import STEPS, Bench, Progress
from howdah.bench.temporary_schema import borrowed_schema

__all__ = [
    "STEPS",
    "Bench",
    "Figures",
    "Latency",
    "Progress",
    "Rate",
    "Server",
    "advice",
    "borrowed_schema",
]
