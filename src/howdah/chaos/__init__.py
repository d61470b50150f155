"""Chaos: a load, faults, and a ledger outside the database from which a checker decides, job by job,
whether every promise was kept. `howdah chaos` runs it on a user's own database."""
