-- Maintenance without a leader: each duty is a row of the table maintenance, and the transaction that locks
-- a due row runs that duty.
--
-- Owns the table maintenance. The duties are in recovery.sql, ordering.sql, lanes.sql and partitions.sql.

-- Removes expired idempotency keys and watchers, events of removed jobs, and workers not seen for a day.
CREATE OR REPLACE FUNCTION prune(p_limit int DEFAULT 10000) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    DELETE FROM idempotency_keys
    WHERE key = ANY (ARRAY (
        SELECT k.key FROM idempotency_keys AS k
        WHERE k.expires_at <= clock_timestamp()
        ORDER BY k.expires_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED));
    DELETE FROM job_events
    WHERE (job_id, event_id) IN (
        SELECT e.job_id, e.event_id
        FROM job_events AS e
        WHERE e.at < clock_timestamp() - interval '31 days'
          AND NOT EXISTS (SELECT FROM jobs AS j WHERE j.id = e.job_id)
        LIMIT p_limit);
    DELETE FROM workers
    WHERE worker_id = ANY (ARRAY (
        SELECT w.worker_id FROM workers AS w
        WHERE w.seen_at < clock_timestamp() - interval '1 day'
        FOR UPDATE SKIP LOCKED));
    DELETE FROM watchers
    WHERE ctid = ANY (ARRAY (
        SELECT w.ctid FROM watchers AS w
        WHERE w.until < clock_timestamp()
        FOR UPDATE SKIP LOCKED));
END $$;

CREATE OR REPLACE FUNCTION prune_throughput() RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$ DELETE FROM throughput WHERE bucket < clock_timestamp() - interval '1 day' $$;

CREATE OR REPLACE FUNCTION run_duty(p_duty text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    CASE p_duty
        WHEN 'recover' THEN PERFORM recover_expired();
        WHEN 'keys' THEN PERFORM assign_keys();
        WHEN 'sweep' THEN PERFORM sweep_lanes();
        WHEN 'prune' THEN PERFORM prune(), prune_throughput();
        WHEN 'partitions' THEN PERFORM maintain_partitions();
    END CASE;
END $$;

-- Runs every duty that is due and that no other transaction is running. A duty that fails records its error
-- in its row and in the result; the others still run. `partitions` runs last because its locks last until
-- the commit.
CREATE OR REPLACE FUNCTION run_maintenance() RETURNS TABLE (duty text, took interval, error text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_duty record;
    v_started timestamptz;
BEGIN
    FOR v_duty IN
        SELECT m.duty, m.period
        FROM maintenance AS m
        WHERE m.due_at <= clock_timestamp()
        ORDER BY m.rank
        FOR UPDATE SKIP LOCKED
    LOOP
        v_started := clock_timestamp();
        duty := v_duty.duty;
        error := NULL;
        BEGIN
            PERFORM run_duty(v_duty.duty);
        EXCEPTION WHEN OTHERS THEN
            error := SQLERRM;
        END;
        took := clock_timestamp() - v_started;
        UPDATE maintenance AS m
        SET due_at = clock_timestamp() + greatest(m.period, m.spacing * run_maintenance.took),
            last_run_at = v_started,
            took = run_maintenance.took,
            last_error = run_maintenance.error
        WHERE m.duty = v_duty.duty;
        RETURN NEXT;
    END LOOP;
END $$;
