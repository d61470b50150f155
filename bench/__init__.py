"""Benchmarks against the real peers: the same work, on the same machine, in one run.

`python -m bench` runs them (`make bench`, `make bench-quick`). This package is also on the path of every
adapter's process, which runs in an environment of the peer's own: what adapters import from here needs
nothing but the standard library.

    services.py      the PostgreSQL and the Redis that peers are measured on
    environments.py  a virtual environment for each peer, below .bench/
    launch.py        processes of adapters: start, talk to, stop
    adapters/        one file for each peer; driver.py has what they share
    ledger.py        which handlers ran, and when; in memory that processes share
    workloads.py     one round of each kind of work
    results.py       rounds, medians and spreads; bench/results.json
    report.py        docs/benchmarks.md, from the results alone
"""
