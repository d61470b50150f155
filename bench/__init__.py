"""Benchmarks against other queues: the same work, on the same machine, in one run.

`python -m bench` runs them (`make bench`, `make bench-quick`). This package is also on the Python path of every
adapter process, which runs in the peer's own environment: modules that adapters import from here use only the
standard library.

    services.py          the PostgreSQL and the Redis server that peers are measured on
    peers.py             the peers, and an environment for each, below .bench/
    adapter_process.py   adapter processes: start, send requests, stop
    adapters/            one file per peer; driver.py holds what they share
    auto_tuning.py       chooses the best settings of a peer during a run
    compare_settings.py  compares more settings of peers, by hand
    ledger.py            which handlers ran, and when; in memory that processes share
    workloads.py         one round of each workload
    howdah_checks.py     what every round of Howdah must prove
    pgbench.py           the ceiling without Python
    plan.py              which peers run which workloads, in which order
    growth.py            queues of millions of jobs: growth_data.py fills them, growth_measurements.py
                         measures them, growth_report.py writes the chapter
    soak/                `make soak`: half an hour of mixed load, and a verdict for every curve
    results.py           rounds, medians and spreads; bench/results.json
    goals.py             the goals; reasons.toml explains missed ones
    report.py            docs/benchmarks.md, from the results alone; plots.py draws
"""
