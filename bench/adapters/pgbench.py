"""An upper bound, not a peer: pgbench, which is part of PostgreSQL, runs the statements of Howdah's worker with one
client and batches of 4,000. It executes no handlers; completed jobs are counted in the tables.

`bench/pgbench.py` runs it. This adapter creates the schema and fills the queue.
"""

from __future__ import annotations

from bench.adapters import driver
from bench.adapters.howdah import Howdah

if __name__ == "__main__":
    driver.main(Howdah)
