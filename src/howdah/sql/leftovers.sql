-- Runs after the function files. CREATE OR REPLACE writes a new version of a function's catalog row, so a
-- function with an older row is not in the files: it is a stale overload that no table step drops, which callers
-- could still reach, or it was added by hand.
DO $leftovers$
DECLARE
    v_leftovers text := (
        SELECT string_agg(p.oid::regprocedure::text, ', ' ORDER BY p.oid::regprocedure::text)
        FROM pg_proc AS p
        -- Not xmin <> pg_current_xact_id(): a client that sets savepoints runs the files in subtransactions.
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND age(p.xmin) > 0);
BEGIN
    IF v_leftovers IS NOT NULL THEN
        RAISE EXCEPTION 'schema "%" contains functions that this version of Howdah does not have: %',
                        current_schema(), v_leftovers
            USING ERRCODE = 'duplicate_function',
                  HINT = 'Move a function of yours to another schema (ALTER ROUTINE ... SET SCHEMA ...), drop '
                         'any other (DROP ROUTINE ...), and migrate again.';
    END IF;
END $leftovers$;
