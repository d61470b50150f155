"""The worker's handle of one task process: starts it, exchanges messages with it, stops it, and notices that it has
ended. `processes.py` decides what runs in it; `task_process.py` is the other end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import reduction, spawn
from typing import TYPE_CHECKING, Any

from howdah.encoding.safe_logger import get_logger
from howdah.errors import HowdahError
from howdah.worker.process_messages import RECEIVED_BYTES, Messages, number_of, socket_pair

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

EXIT_POLL_SECONDS = 0.1
# Howdah and what it imports are found without the directories of the program, if possible: a file there may have the name
# of a standard module. `-c` puts the current directory first.
_PROGRAM = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import json
start = json.loads(sys.stdin.buffer.readline())
sys.path += [each for each in start["main"]["sys_path"] if each not in sys.path]
from howdah.worker.task_process import main
main(start)
"""
_STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Launcher:
    """How to start a task process: the directory, the module path and the main module of this process, as they are
    when the worker starts. A handler may change them, and leave the worker in a directory that is removed.

    Not with `multiprocessing`, which would count the process among the children of the program: a handler that joins
    or kills its own children would join or kill it."""

    def __init__(self, set_up: Callable[[], object] | None) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise HowdahError(
                "a worker was started while a task process imported the main module; "
                'start it below `if __name__ == "__main__":`.'
            )
        try:
            self._directory = os.getcwd()
        except OSError:  # it was removed
            self._directory = "/"
        self._main: dict[str, Any] = {
            "name": "howdah-task",
            "sys_path": [each or self._directory for each in sys.path],
            "sys_argv": sys.argv,
        }
        if (method := multiprocessing.get_start_method(allow_none=True)) is not None:
            self._main["start_method"] = method
        main = sys.modules["__main__"]
        name = getattr(getattr(main, "__spec__", None), "name", None)
        path = getattr(main, "__file__", None)
        if name is not None:
            self._main["init_main_from_name"] = name
        elif path is not None:
            self._main["init_main_from_path"] = os.path.join(self._directory, path)
        self._set_up = bytes(reduction.ForkingPickler.dumps(set_up))

    def start(self, end: socket.socket) -> subprocess.Popen[bytes]:
        """Start a process with this end of a pair of sockets."""
        given = {"main": self._main, "socket": end.fileno(), "worker": os.getpid()}
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # Until it handles them, the process must not receive the signals that Ctrl-C and init systems send to a whole
        # process group.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [spawn.get_executable(), *flags, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                pass_fds=[end.fileno()],
                cwd=self._directory if os.path.isdir(self._directory) else "/",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(OSError), process.stdin as file:  # it may have ended
            file.write(json.dumps(given, default=str).encode() + b"\n" + self._set_up)
        return process


class TaskProcess:
    """A process that runs one handler at a time. `on_message` is called with this handle and each message,
    `on_exit` once, after the last message."""

    def __init__(
        self,
        launcher: Launcher,
        on_message: Callable[[TaskProcess, list[Any]], None],
        on_exit: Callable[[TaskProcess], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._messages = Messages()
        self.loop = asyncio.get_running_loop()
        self.runs = 0
        """How many runs it was given. A message names the number of its run."""
        self.has_exited = False
        self.has_taken_run = True
        """After its end: whether the process has read the last message "run"."""
        self._run_message = -1
        self.exit_status: int | None = None
        """After its end. Negative: the number of the signal that killed it. None: unknown."""
        # Theirs is kept open: after the process has ended, a message that it did not read can be read here.
        self._socket, self._theirs = socket_pair()
        self._is_reading = self._is_broken = False
        try:
            # In this thread, which lives as long as the worker: the kernel kills the process when it ends.
            self._process = launcher.start(self._theirs)
        except BaseException:
            self._socket.close()
            self._theirs.close()
            raise
        self.pid = self._process.pid
        self._pidfd = _open_pidfd(self.pid)
        self.resume()
        if self._pidfd is None:
            self.loop.call_later(EXIT_POLL_SECONDS, self._poll_exit)
        else:
            self.loop.add_reader(self._pidfd, self._end)

    def hand_over(self, *values: Any) -> None:
        """Give it a run."""
        self.runs += 1
        self._run_message, datagrams = self._messages.encode("run", self.runs, *values)
        self._send(datagrams)

    def send(self, kind: str, *values: Any) -> None:
        """Send a message about the current run. If the process has ended, `on_exit` follows."""
        if not self.has_exited:
            self._send(self._messages.encode(kind, self.runs, *values)[1])

    def _send(self, datagrams: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            for datagram in datagrams:
                self._socket.send(datagram)

    def pause(self) -> None:
        """Read no more messages for now. When the buffer of the socket is full, the process waits."""
        if self._is_reading:
            self._is_reading = False
            self.loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Read messages."""
        if not self._is_reading and not self.has_exited:
            self._is_reading = True
            self.loop.add_reader(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            datagram = self._socket.recv(RECEIVED_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # a handler of this worker has closed it
            self.kill()
            return
        self._accept(datagram)

    def _accept(self, datagram: bytes) -> None:
        if self._is_broken:
            return
        try:
            message = self._messages.decode(datagram)
            if message is not None:
                self._on_message(self, message)
        except Exception as error:
            # A handler has written to the socket.
            logger.warning(
                "killing a task process: a message of it cannot be read",
                extra={"pid": self.pid, "error": f"{type(error).__name__}: {error}"},
            )
            self._is_broken = True
            self.kill()

    def forget_parts(self) -> None:
        """A run has ended."""
        self._messages.forget_parts()

    def raise_in_handler(self) -> None:
        """Let the process read its messages now, also while its handler runs."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.has_exited:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is None:
                os.kill(self.pid, number)
            else:  # a handler of the worker may have waited for the process, and the pid may be that of another
                signal.pidfd_send_signal(self._pidfd, number)

    def _poll_exit(self) -> None:
        """On a system without pidfds."""
        if self._reap():
            self._end()
        else:
            self.loop.call_later(EXIT_POLL_SECONDS, self._poll_exit)

    def _reap(self) -> bool:
        """Whether the process has ended. Not by `Popen.poll`: its status is 0 if a handler of the worker has waited
        for the process."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            self._process.returncode = 0
            return True
        if pid:
            self.exit_status = self._process.returncode = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def _end(self) -> None:
        if self.has_exited:
            return
        self.pause()
        try:
            with contextlib.suppress(OSError):
                while True:
                    self._accept(self._socket.recv(RECEIVED_BYTES))
            with contextlib.suppress(OSError):
                while True:
                    unread = self._theirs.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT)
                    if number_of(unread) == self._run_message:
                        self.has_taken_run = False
        finally:
            self.has_exited = True
            if self._pidfd is not None:
                self.loop.remove_reader(self._pidfd)
                self._reap()
            self._close()
            self._on_exit(self)

    def _close(self) -> None:
        self._socket.close()
        self._theirs.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system
        return None
