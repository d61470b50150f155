"""The worker: claims jobs of an app's tasks and runs them. `Worker` is all that others need."""

from howdah.worker.runner import Worker

__all__ = ["Worker"]
