"""The worker's handle of one task process: starts it, exchanges messages with it, stops it, and notices that it has
ended. `processes.py` decides what runs in it; `task_process.py` is the other end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from howdah.worker import task_process
from howdah.worker.process_messages import RECEIVED_BYTES, Messages, number_of, socket_pair

if TYPE_CHECKING:
    from collections.abc import Callable


class TaskProcess:
    """A process that runs one handler at a time. `on_message` is called with this handle and each message,
    `on_exit` once, after the last message."""

    def __init__(
        self,
        set_up: Callable[[], object] | None,
        on_message: Callable[[TaskProcess, list[Any]], None],
        on_exit: Callable[[TaskProcess], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._messages = Messages()
        self.loop = asyncio.get_running_loop()
        self.runs = 0
        """How many runs it was given. A message names the number of its run."""
        self.entered: set[str] = set()
        """The tasks of which it has entered a handler."""
        self.has_exited = False
        self.has_taken_run = True
        """After its end: whether the process has read the last message "run"."""
        self._run_message = -1
        self.exit_status: int | None = None
        """After its end. Negative: the number of the signal that killed it. None: unknown."""
        self._socket, theirs = socket_pair()
        # Kept open: after the process has ended, a message that it did not read can be read here.
        self._theirs = theirs
        self._socket.setblocking(False)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=task_process.serve, args=(theirs, os.getpid(), set_up), name="howdah-task"
        )
        try:
            # In this thread, which lives as long as the worker: the kernel kills the process when it ends.
            self._process.start()
        except BaseException:
            self._socket.close()
            theirs.close()
            raise
        self.pid = self._process.pid or 0
        self._pidfd = _open_pidfd(self.pid)
        self.loop.add_reader(self._socket.fileno(), self._receive)
        self.loop.add_reader(self._exit_fd, self._end)

    @property
    def _exit_fd(self) -> int:
        """Readable when the process has ended. The sentinel of `multiprocessing` is not, while a process that the
        handler has forked holds it open; the pidfd is, also if a handler of the worker has waited for the process."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def hand_over(self, *values: Any) -> None:
        """Give it a run."""
        self.runs += 1
        self._run_message, datagrams = self._messages.encode("run", self.runs, *values)
        self._send(datagrams)

    def send(self, kind: str, *values: Any) -> None:
        """Send a message about the current run. If the process has ended, `on_exit` follows."""
        self._send(self._messages.encode(kind, self.runs, *values)[1])

    def _send(self, datagrams: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            for datagram in datagrams:
                self._socket.send(datagram)

    def _receive(self) -> None:
        try:
            datagram = self._socket.recv(RECEIVED_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # a handler of this worker has closed it
            self.kill()
            return
        message = self._messages.decode(datagram)
        if message is not None:
            self._on_message(self, message)

    def receive_all(self) -> None:
        """Receive what the process has sent so far."""
        with contextlib.suppress(OSError):
            while True:
                message = self._messages.decode(self._socket.recv(RECEIVED_BYTES))
                if message is not None:
                    self._on_message(self, message)

    def forget_parts(self) -> None:
        """A run has ended."""
        self._messages.forget_parts()

    def raise_in_handler(self) -> None:
        """Let the process read its messages now, also while its handler runs."""
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        if self.has_exited:
            return
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_reader(self._exit_fd)
        self.receive_all()
        self.has_exited = True
        with contextlib.suppress(OSError):
            while True:
                unread = self._theirs.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT)
                self.has_taken_run = self.has_taken_run and number_of(unread) != self._run_message
        self.exit_status = self._process.exitcode
        self._close()
        self._on_exit(self)

    def _close(self) -> None:
        self._socket.close()
        self._theirs.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        with contextlib.suppress(ValueError):  # a handler of the worker has waited for it
            self._process.close()


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system
        return None
