"""The code blocks of the guide on testing, run as one test module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/guides/testing.md"


def test_all_tests_in_the_guide_pass(tmp_path: Path, empty_database: str) -> None:
    parts = GUIDE.read_text().split("```")
    code = "\n".join(part.removeprefix("python\n") for part in parts if part.startswith("python\n"))
    (tmp_path / "test_page.py").write_text(code)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"--howdah-database-url={empty_database}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert f"{code.count('def test_')} passed" in run.stdout
