"""Benchmarks against the real peers: the same work, on the same machine, in one run.

`python -m bench` runs them (`make bench`, `make bench-quick`). This package is also on the path of every
adapter's process, which runs in an environment of the peer's own: what adapters import from here needs
nothing but the standard library.

    services.py      the PostgreSQL and the Redis that peers are measured on
    peers.py         who is measured, and an environment for each, below .bench/
    launch.py        processes of adapters: start, talk to, stop
    adapters/        one file for each peer; driver.py has what they share
    choices.py       the settings of peers that a run tries itself; tryouts.py has more, by hand
    ledger.py        which handlers ran, and when; in memory that processes share
    workloads.py     one round of each kind of work
    howdah_checks.py what every round of ours must prove
    pgbench.py       the ceiling that is no Python at all
    plan.py          which workloads are run for whom, in which order
    growth.py        queues of millions; with growing.py, filling.py and growth_report.py
    results.py       rounds, medians and spreads; bench/results.json
    bars.py          what was to be reached; reasons.toml says why something was not
    report.py        docs/benchmarks.md, from the results alone; plots.py draws
"""
