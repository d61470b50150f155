"""Chaos tests: a load, injected faults, and a ledger outside the database. A checker reads the ledger and decides for
each job whether every promise was kept. `howdah chaos` runs them on a user's database.

    run.py             one run, from the schema to the verdict
    scenario.py        what a scenario is; process_faults.py has the scenarios that need only signals
    processes/         workers, producers, and their supervisor
    ledger.py          what the processes observed; history.py indexes it
    checker.py         runs the checks in checks/, one module per group of promises
    fault_hits.py      which faults hit a job in flight
    report.py          the result as a table, as JSON, and live
"""
