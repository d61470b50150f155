"""The asyncio tasks of Howdah itself. A handler shares its event loop with them and may cancel all tasks of the loop.
These tasks ignore it and report the job (decision 0027)."""

from __future__ import annotations

import asyncio
import contextvars
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

running_job: ContextVar[Any] = ContextVar("howdah_context", default=None)
"""The `Context` of the job whose handler runs here. Timers, callbacks and tasks that a handler creates inherit it."""


_in_service: ContextVar[bool] = ContextVar("howdah_in_service", default=False)
"""Whether this code, or the code that has set this timer, belongs to a service task."""


class ServiceTask(asyncio.Task[None]):
    """A task that only its owner, the timers of service tasks and the end of the event loop can cancel: no handler,
    and no thread that a handler has started, which inherits no context variables. It starts outside of any job, so
    its own timeouts work as usual."""

    def __init__(
        self,
        work: Coroutine[Any, Any, None],
        *,
        name: str,
        context: contextvars.Context | None = None,
        on_refused: Callable[[Any], None] | None = None,
    ) -> None:
        variables = contextvars.copy_context() if context is None else context
        variables.run(running_job.set, None)
        variables.run(_in_service.set, True)
        self._on_refused = on_refused
        super().__init__(work, loop=asyncio.get_running_loop(), name=name, context=variables)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel, unless the caller is a handler or unknown. The owner calls `end`."""
        job = running_job.get()
        if (
            self.done()
            or asyncio._get_running_loop() is None
            or (self.accepts(job) if job is not None else _in_service.get())
        ):
            return super().cancel(msg)
        if self._on_refused is not None:
            self._on_refused(job)
        return False

    def accepts(self, job: Any) -> bool:
        """Whether this job may cancel the task."""
        return False

    def end(self) -> None:
        """Cancel, whatever the caller's context."""
        super().cancel()


class WorkerTask(ServiceTask):
    """A part of a worker. The end of an event loop cancels every task at once; `Worker.run` then stops the parts
    in order, after the jobs were released."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel, unless the caller is a handler or the end of the event loop."""
        if asyncio._get_running_loop() is None:
            return False
        return super().cancel(msg)
