"""Records `howdah demo`: runs it, and writes its output to docs/demo.txt and into the README.

make recording
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "docs/demo.txt"
README = ROOT / "README.md"
WIDTH = "100"
MARK = "<!-- not run: recorded by `make recording` -->\n"
_BLOCK = re.compile(re.escape(MARK) + r"```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def record() -> str:
    """The output of `make demo` without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "howdah", "demo"],
        env={**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"


def with_recording(page: str, recording: str) -> str:
    """The page with the new recording."""
    block = f"{MARK}```text\n$ make demo\n{recording}```"
    changed, count = _BLOCK.subn(lambda _: block, page)
    if count != 1:
        raise SystemExit(f"README.md has {count} places for the recording; it needs one.")
    return changed


if __name__ == "__main__":
    recording = record()
    RECORDING.write_text(recording)
    README.write_text(with_recording(README.read_text(), recording))
    print(recording, end="")
