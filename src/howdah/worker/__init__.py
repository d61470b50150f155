"""The worker: claims the jobs of an app's tasks and runs them. Other packages use only `Worker`."""

from howdah.worker.runner import Worker

__all__ = ["Worker"]
