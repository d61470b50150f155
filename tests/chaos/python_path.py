"""The Python path of processes that need modules of the tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def with_python_path(directory: Path) -> str:
    """PYTHONPATH with this directory first: the rest decides which copy of Howdah is tested."""
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
