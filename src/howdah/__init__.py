"""Howdah: background jobs on the PostgreSQL you already have.

Most programs use `App` and its tasks. `JobQueue` and `AsyncJobQueue` are the bare queue below them. Every public
name is in `__all__`.
"""

from howdah.app import App
from howdah.async_queue import AsyncJobQueue
from howdah.context import Context, current
from howdah.errors import (
    ConnectionLimit,
    DatabaseClosed,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseTimeout,
    DatabaseUnreachable,
    DuplicateTask,
    EmbeddedServerError,
    HowdahError,
    IdempotencyConflict,
    InvalidJob,
    InvalidOption,
    JobCancelled,
    JobFailed,
    JobLocked,
    JobNotFound,
    LeaseLost,
    NoDatabase,
    NotClaimed,
    NotPermitted,
    PayloadTooLarge,
    ResultTimeout,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    TaskInFlight,
    TooManyEvents,
    UnknownTask,
)
from howdah.execution.watch import Change
from howdah.hooks import StateChange
from howdah.model import (
    BACKFILL,
    DISCOVERED,
    EXPLICIT,
    Claim,
    Event,
    Handle,
    Job,
    NewJob,
    Status,
    request_id,
)
from howdah.outcome import Aborted, Cancel, Fail, Snooze
from howdah.queue import JobQueue
from howdah.retry import Retry
from howdah.task import Task, TaskHandle
from howdah.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "BACKFILL",
    "DISCOVERED",
    "EXPLICIT",
    "Aborted",
    "App",
    "AsyncJobQueue",
    "Cancel",
    "Change",
    "Claim",
    "ConnectionLimit",
    "Context",
    "DatabaseClosed",
    "DatabaseFull",
    "DatabaseReadOnly",
    "DatabaseTimeout",
    "DatabaseUnreachable",
    "DuplicateTask",
    "EmbeddedServerError",
    "Event",
    "Fail",
    "Handle",
    "HowdahError",
    "IdempotencyConflict",
    "InvalidJob",
    "InvalidOption",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobLocked",
    "JobNotFound",
    "JobQueue",
    "LeaseLost",
    "NewJob",
    "NoDatabase",
    "NotClaimed",
    "NotPermitted",
    "PayloadTooLarge",
    "ResultTimeout",
    "Retry",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Snooze",
    "StateChange",
    "Status",
    "Task",
    "TaskHandle",
    "TaskInFlight",
    "TooManyEvents",
    "UnknownTask",
    "Worker",
    "current",
    "request_id",
]
