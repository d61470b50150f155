-- Write the state of claimed jobs while they run: leases, start times, progress and events.
--
-- Owns lease_expires_at, started_at, progress and current_stage of claimed jobs, and the table job_events.
-- Promises: every write carries its fence (P3), and a heartbeat waits for no other transaction.
--
-- The joins follow the rule in acknowledge.sql.

-- Extends leases to now + p_lease, including an expired lease of a job that was not recovered yet. Returns
-- for each id whether it was extended and whether the lease is still the caller's (`mine`): a row that the
-- job's own handler has locked is skipped, not lost. p_elapsed: seconds since the job started, NULL if it
-- did not.
CREATE OR REPLACE FUNCTION extend_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_lease interval DEFAULT '30 seconds',
    p_elapsed float8[] DEFAULT NULL)
RETURNS TABLE (id uuid, extended boolean, mine boolean, cancel_requested boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT j.id, a.elapsed
        FROM unnest(p_ids, p_lease_ids, p_elapsed) AS a (id, lease_id, elapsed)
        JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
        WHERE j.id = ANY (p_ids)
        FOR NO KEY UPDATE OF j SKIP LOCKED)
    UPDATE live_jobs AS j
    SET lease_expires_at = v_now + p_lease,
        started_at = coalesce(j.started_at,
            CASE WHEN l.elapsed IS NOT NULL
                 THEN greatest(j.claimed_at, v_now - make_interval(secs => l.elapsed)) END)
    FROM locked AS l
    WHERE j.id = l.id AND j.id = ANY (p_ids);
    RETURN QUERY
    SELECT a.id,
           coalesce(j.lease_expires_at = v_now + p_lease, false),
           j.id IS NOT NULL,
           coalesce(j.cancel_requested, false)
    FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id AND j.id = ANY (p_ids);
END $$;

-- Records that jobs started. A worker calls this before it runs a job whose earlier claims ended without a
-- trace, so that a job that kills its worker uses up its attempts (decision 0020).
CREATE OR REPLACE FUNCTION start_jobs(p_ids uuid[], p_lease_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    UPDATE live_jobs AS j
    SET started_at = coalesce(j.started_at, clock_timestamp())
    FROM unnest(lock_leased(p_ids, p_lease_ids)) AS a (id)
    WHERE j.id = a.id AND j.id = ANY (p_ids)
    RETURNING j.id;
END $$;

-- Records progress (percent, never decreasing within an attempt) and stage; NULL leaves the value
-- unchanged. Returns the same columns as extend_jobs.
CREATE OR REPLACE FUNCTION report_progress(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_progress int[],
    p_stages text[] DEFAULT NULL)
RETURNS TABLE (id uuid, reported boolean, mine boolean, cancel_requested boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_reported uuid[];
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT j.id, a.progress, a.stage
        FROM unnest(p_ids, p_lease_ids, p_progress, p_stages) AS a (id, lease_id, progress, stage)
        JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
        WHERE j.id = ANY (p_ids)
        FOR NO KEY UPDATE OF j SKIP LOCKED),
    reported AS (
        UPDATE live_jobs AS j
        SET progress = greatest(j.progress, CASE WHEN l.progress > 100 THEN 100 ELSE l.progress END),
            current_stage = coalesce(left(l.stage, 100), j.current_stage),
            started_at = coalesce(j.started_at, clock_timestamp())
        FROM locked AS l
        WHERE j.id = l.id AND j.id = ANY (p_ids)
        RETURNING j.id)
    SELECT array_agg(r.id) INTO v_reported FROM reported AS r;
    PERFORM notify_watchers(v_reported);
    RETURN QUERY
    SELECT a.id,
           coalesce(j.id = ANY (v_reported), false),
           j.id IS NOT NULL,
           coalesce(j.cancel_requested, false)
    FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id AND j.id = ANY (p_ids);
END $$;

-- Appends events to the durable event stream of claimed jobs; an id may appear more than once.
CREATE OR REPLACE FUNCTION add_events(p_ids uuid[], p_lease_ids uuid[], p_kinds text[], p_datas jsonb[])
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_accepted uuid[] := lock_leased(p_ids, p_lease_ids);
BEGIN
    RETURN QUERY
    WITH written AS (
        INSERT INTO job_events (job_id, attempt, kind, data)
        SELECT j.id, j.attempts, e.kind, coalesce(e.data, '{}')
        FROM unnest(p_ids, p_lease_ids, p_kinds, p_datas) WITH ORDINALITY AS e (id, lease_id, kind, data, n)
        JOIN live_jobs AS j ON j.id = e.id AND j.lease_id = e.lease_id
        WHERE e.id = ANY (v_accepted) AND j.id = ANY (v_accepted)
        ORDER BY e.n
        RETURNING job_id),
    counted AS (
        UPDATE live_jobs AS j
        SET events_count = j.events_count + w.events
        FROM (SELECT job_id, count(*)::int AS events FROM written GROUP BY job_id) AS w
        WHERE j.id = w.job_id AND j.id = ANY (v_accepted)
        RETURNING j.id)
    SELECT c.id FROM counted AS c;
    PERFORM notify_watchers(v_accepted);
END $$;

-- Appends events to jobs that this lease has completed: a handler that completes its job in its own
-- transaction may do so before its last events are written.
CREATE OR REPLACE FUNCTION add_late_events(p_ids uuid[], p_lease_ids uuid[], p_kinds text[], p_datas jsonb[])
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_accepted uuid[];
BEGIN
    v_accepted := ARRAY (
        SELECT f.id
        FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
        JOIN finished_jobs AS f ON f.id = a.id AND f.lease_id = a.lease_id
        FOR NO KEY UPDATE OF f SKIP LOCKED);
    RETURN QUERY
    WITH written AS (
        INSERT INTO job_events (job_id, attempt, kind, data)
        SELECT f.id, f.attempts, e.kind, coalesce(e.data, '{}')
        FROM unnest(p_ids, p_kinds, p_datas) WITH ORDINALITY AS e (id, kind, data, n)
        JOIN finished_jobs AS f ON f.id = e.id
        WHERE e.id = ANY (v_accepted)
        ORDER BY e.n
        RETURNING job_id)
    UPDATE finished_jobs AS f
    SET events_count = f.events_count + w.events
    FROM (SELECT job_id, count(*)::int AS events FROM written GROUP BY job_id) AS w
    WHERE f.id = w.job_id
    RETURNING f.id;
    PERFORM notify_watchers(v_accepted);
END $$;
