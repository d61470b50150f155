"""Howdah: background jobs on the PostgreSQL you already have.

`JobQueue` and `AsyncJobQueue` are the bare queue; everything public is listed in `__all__`.
"""

from howdah.errors import (
    DatabaseUnreachable,
    EmbeddedServerError,
    HowdahError,
    InvalidJob,
    InvalidOption,
    JobNotFound,
    LeaseLost,
    NoDatabase,
    NotClaimed,
    PayloadTooLarge,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
)
from howdah.model import (
    BACKFILL,
    DISCOVERED,
    EXPLICIT,
    Event,
    Handle,
    Job,
    NewJob,
    Status,
    request_id,
)
from howdah.queue import AsyncJobQueue, JobQueue

__version__ = "0.1.0"

__all__ = [
    "BACKFILL",
    "DISCOVERED",
    "EXPLICIT",
    "AsyncJobQueue",
    "DatabaseUnreachable",
    "EmbeddedServerError",
    "Event",
    "Handle",
    "HowdahError",
    "InvalidJob",
    "InvalidOption",
    "Job",
    "JobNotFound",
    "JobQueue",
    "LeaseLost",
    "NewJob",
    "NoDatabase",
    "NotClaimed",
    "PayloadTooLarge",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Status",
    "request_id",
]
