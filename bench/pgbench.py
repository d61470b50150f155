"""The second ceiling: pgbench runs the statements of Howdah's worker, so that no client but PostgreSQL's own
is in the way. No handlers are executed here; what it claims and completes is counted in the tables."""

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
    from bench.workloads import Figures, Stage

BATCH = 4000
SCRIPT = """\
SELECT coalesce(array_agg(id), '{{}}') AS ids, coalesce(array_agg(lease_id), '{{}}') AS fences
FROM ({claim}) AS claimed \\gset
{complete};
"""


def script() -> str:
    """Claim a batch and complete it, as the worker's own statements do."""
    statements = WorkerStatements("howdah")
    claim = statements.claim("", [], 0, None, [], False).text  # type: ignore[arg-type]
    values = ["'pgbench'", "'{async}'", str(BATCH), "'30 s'", "'{default}'", "false"]
    complete = statements.complete_jobs([], [], []).text
    nothing = "array_fill(NULL::text, ARRAY[cardinality(:ids::uuid[])])"
    acknowledged = [":ids", ":fences", nothing, "NULL", "false"]
    return SCRIPT.format(claim=_fill(claim, values), complete=_fill(complete, acknowledged))


def _fill(text: str, values: list[str]) -> str:
    return re.sub(r"\$(\d)", lambda match: values[int(match[1]) - 1], text)


def drain(stage: Stage, peer: Peer, jobs: int) -> Figures:
    """Fill Howdah's tables, and let pgbench empty them."""
    stage.prepare(peer)
    workloads.enqueue(stage, peer, jobs, handler="async")
    stage.settle(peer)
    turns = -(-jobs // BATCH)
    rate = _run(stage, turns)
    howdah_checks.prove(stage, peer, jobs, work=lambda: _run(stage, 1))
    return {"jobs_per_second": jobs * rate / turns}


def _run(stage: Stage, turns: int) -> float:
    """Run the script so many times; gives how often a second, without the time to connect."""
    program = stage.postgres.program("pgbench")
    if program is None:
        raise AdapterError("pgbench is not installed")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script())
        file.flush()
        options = ["--no-vacuum", "--protocol=prepared", "--client=1"]
        done = subprocess.run(
            [program, *options, f"--transactions={turns}", f"--file={file.name}"],
            env={**os.environ, **stage.postgres.environment, "PGDATABASE": "bench_pgbench"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    told = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode != 0 or told is None:
        raise AdapterError(f"pgbench ended with {done.returncode}: {done.stderr[-400:]}")
    return float(told[1])
