"""Smoke test of an installed wheel: import it, start a server, run a job, remove the server.

Runs in the environment of the wheel, outside the source tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path


def howdah(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "howdah"), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check(what: str, holds: bool) -> None:
    if not holds:
        sys.exit(f"smoke: FAILED: {what}")
    print(f"smoke: {what}")


def main() -> None:
    for name in ("HOWDAH_DATABASE_URL", "DATABASE_URL"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="howdah-smoke-") as directory:
        os.chdir(directory)
        try_package()
        try_queue()
        check("the server was removed", not Path(".howdah/pg18").exists())


def try_package() -> None:
    import howdah as package

    origin = Path(package.__file__)
    check(
        f"imported from the wheel, not from the source: {origin.parent}",
        "site-packages" in origin.parts,
    )
    version = metadata.version("howdah")
    check(f"the package has version {version}", version == package.__version__)
    check("the command prints the same version", howdah("--version").split()[-1] == version)
    check("the types are shipped", (resources.files("howdah") / "py.typed").is_file())
    check("the licence is shipped", bool(metadata.metadata("howdah").get_all("License-File")))


def try_queue() -> None:
    from howdah import JobQueue

    check("`howdah db start` works", "postgresql://" in howdah("db", "start"))
    try:
        queue = JobQueue()
        handle = queue.enqueue("greet", {"name": "Ada"})
        job = queue.claim_one(["greet"])
        check("the enqueued job is claimed", job is not None and job.id == handle.id)
        queue.complete(handle, {"said": "hello"})
        check("its result is stored", queue.get(handle).result == {"said": "hello"})
        queue.close()
        check(
            "`howdah migrate --check` reports an up-to-date schema",
            "up to date" in howdah("migrate", "--check"),
        )
    finally:
        howdah("db", "rm", "--yes")


if __name__ == "__main__":
    main()
