"""What the stores set and read in a session after they connect."""

from __future__ import annotations

SESSION_SETUP = """
DO $$
BEGIN
    PERFORM pg_catalog.set_config('array_nulls', 'on', false);
    BEGIN
        PERFORM pg_catalog.set_config('client_connection_check_interval', '2000', false);
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
END $$
"""
"""A client that gives up closes its connection. A session that waits for a lock would not notice: behind a lock on a
table, every retry would leave one more session, until the server has none left. So the server checks every two seconds.
On some operating systems it cannot; there the setting is refused and left out.

`array_nulls`: psycopg sends arrays as text, and with `off` the server reads NULL in an array as a word.

Not in the startup packet: a pooler would refuse the connection. The settings stay in a session of a pooler, where they
change nothing for other clients."""

READ_STRICT = (
    "SELECT current_setting('default_transaction_isolation') NOT IN "
    "('read committed', 'read uncommitted')"
)
"""Whether transactions of this session are stricter than READ COMMITTED by default."""
