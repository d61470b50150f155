"""Several Python processes that begin at the same moment."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack


def at_once(count: int, code: str, *arguments: str) -> list[str]:
    """Run code in `count` processes and give the last line that each printed.

    The code sees `arguments` as sys.argv[1:] and calls `start()` when it is ready: none goes on before
    all are.
    """
    prelude = "import sys\ndef start():\n    print('ready', flush=True)\n    sys.stdin.readline()\n"
    command = [sys.executable, "-c", prelude + code, *arguments]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(count)
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0] for process in started]
        assert [process.returncode for process in started] == [0] * count
    return [answer.splitlines()[-1] for answer in answers]
