"""The second ceiling: pgbench, the client of PostgreSQL itself, runs the statements of Howdah's worker. It executes no
handlers; what it claims and completes is counted in the tables."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import TYPE_CHECKING

from bench import howdah_checks, workloads
from bench.adapter_process import AdapterError
from howdah.protocol.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from bench.peers import Peer
    from bench.workloads import Figures, Testbed

BATCH_JOBS = 4000
SCRIPT = """\
SELECT coalesce(array_agg(id), '{{}}') AS ids, coalesce(array_agg(lease_id), '{{}}') AS fences
FROM ({claim}) AS claimed \\gset
{complete};
"""


def script() -> str:
    """A script that claims a batch and completes it with the worker's statements."""
    statements = WorkerStatements("howdah")
    claim = statements.claim("", [], 0, None, [], None).text  # type: ignore[arg-type]
    values = ["'pgbench'", "'{async}'", str(BATCH_JOBS), "'30 s'", "'{default}'", "NULL"]
    complete = statements.complete_runs([], [], [], None).text
    acknowledged = [":ids", ":fences", "NULL", "NULL"]
    return SCRIPT.format(claim=_fill(claim, values), complete=_fill(complete, acknowledged))


def _fill(text: str, values: list[str]) -> str:
    return re.sub(r"\$(\d)", lambda match: values[int(match[1]) - 1], text)


def drain(testbed: Testbed, peer: Peer, jobs: int) -> Figures:
    """Fill Howdah's tables, and drain them with pgbench."""
    testbed.prepare(peer)
    workloads.enqueue(testbed, peer, jobs, handler="async")
    testbed.vacuum(peer)
    runs = -(-jobs // BATCH_JOBS)
    rate = _run(testbed, runs)
    howdah_checks.prove(testbed, peer, jobs, work=lambda: _run(testbed, 1))
    return {"jobs_per_second": jobs * rate / runs}


def _run(testbed: Testbed, runs: int) -> float:
    """Run the script so many times; reruns runs per second, without the time to connect."""
    program = testbed.postgres.program("pgbench")
    if program is None:
        raise AdapterError("pgbench is not installed")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script())
        file.flush()
        options = ["--no-vacuum", "--protocol=prepared", "--client=1"]
        done = subprocess.run(
            [program, *options, f"--transactions={runs}", f"--file={file.name}"],
            env={**os.environ, **testbed.postgres.environment, "PGDATABASE": "bench_pgbench"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    rate = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode != 0 or rate is None:
        raise AdapterError(f"pgbench exited with {done.returncode}: {done.stderr[-400:]}")
    return float(rate[1])
