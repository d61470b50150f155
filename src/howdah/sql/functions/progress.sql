-- Write the state of claimed jobs while they run: start times, progress and events.
--
-- Owns started_at, progress and current_stage of claimed jobs, and the table job_events. Promises: every write carries
-- its fence (P3).
--
-- The joins follow the rule in acknowledge.sql.

-- Records that jobs started. A worker calls this before it runs a job whose earlier claims ended without a
-- trace, so that a job that kills its worker uses up its attempts (decision 0020).
CREATE OR REPLACE FUNCTION start_jobs(p_ids uuid[], p_lease_ids uuid[], p_wait boolean DEFAULT true)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN QUERY
    UPDATE live_jobs AS j
    SET started_at = coalesce(j.started_at, clock_timestamp())
    FROM unnest(lock_leased(p_ids, p_lease_ids, p_wait)) AS a (id)
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
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_reported uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
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

-- Whether an event with this number is not written yet; p_last is that of the last one that was written. The upper
-- 32 bits of a number name a run, whose events arrive in ascending order. A statement whose answer was lost may
-- run after the one that was sent in its place, so every statement checks this, not only those sent again.
CREATE OR REPLACE FUNCTION is_new_event(p_number bigint, p_last bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN p_number IS NULL OR p_last IS NULL OR p_number >> 32 <> p_last >> 32 OR p_number > p_last;

-- Appends events to the durable event stream of claimed jobs; an id may appear more than once. The row locks of
-- the jobs keep the statements of a run apart.
CREATE OR REPLACE FUNCTION add_events(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_kinds text[],
    p_datas jsonb[],
    p_numbers bigint[] DEFAULT NULL,
    p_wait boolean DEFAULT true)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_accepted uuid[] := lock_leased(p_ids, p_lease_ids, p_wait);
BEGIN
    WITH new AS MATERIALIZED (
        SELECT j.id, j.attempts, live_events_day(j.created_at, j.keep) AS day, e.kind, e.data, e.number, e.n
        FROM unnest(p_ids, p_lease_ids, p_kinds, p_datas, p_numbers)
             WITH ORDINALITY AS e (id, lease_id, kind, data, number, n)
        JOIN live_jobs AS j ON j.id = e.id AND j.lease_id = e.lease_id
        WHERE e.id = ANY (v_accepted) AND j.id = ANY (v_accepted) AND is_new_event(e.number, j.last_event)),
    written AS (
        INSERT INTO job_events (job_id, attempt, drop_on, kind, data)
        SELECT n.id, n.attempts, n.day, n.kind, coalesce(n.data, '{}')
        FROM new AS n
        ORDER BY n.n)
    UPDATE live_jobs AS j
    SET events_count = j.events_count + w.events, last_event = coalesce(w.last, j.last_event)
    FROM (SELECT n.id, count(*)::int AS events, max(n.number) AS last FROM new AS n GROUP BY n.id) AS w
    WHERE j.id = w.id AND j.id = ANY (v_accepted);
    PERFORM notify_watchers(v_accepted);
    RETURN QUERY SELECT DISTINCT a FROM unnest(v_accepted) AS a WHERE a IS NOT NULL;
END $$;

-- Appends events to jobs that this lease has completed: a handler that completes its job in its own
-- transaction may do so before its last events are written.
CREATE OR REPLACE FUNCTION add_late_events(
    p_ids uuid[], p_lease_ids uuid[], p_kinds text[], p_datas jsonb[], p_numbers bigint[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
DECLARE
    v_finished finished_jobs[];
    v_accepted uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    v_finished := ARRAY (
        SELECT f
        FROM finished_jobs AS f
        WHERE f.id = ANY (p_ids)
          AND (f.id, f.lease_id) IN (SELECT a.id, a.lease_id FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id))
        FOR NO KEY UPDATE OF f SKIP LOCKED);
    WITH new AS MATERIALIZED (
        SELECT f.id, f.attempts, f.drop_on, greatest(events_day(f.created_at, f.keep), f.drop_on) AS day,
               e.kind, e.data, e.number, e.n
        FROM unnest(p_ids, p_lease_ids, p_kinds, p_datas, p_numbers)
             WITH ORDINALITY AS e (id, lease_id, kind, data, number, n)
        -- By the fence too: an id may come with a stale one.
        JOIN unnest(v_finished) AS f ON f.id = e.id AND f.lease_id = e.lease_id
        WHERE is_new_event(e.number, f.last_event)),
    written AS (
        INSERT INTO job_events (job_id, attempt, drop_on, kind, data)
        SELECT n.id, n.attempts, n.day, n.kind, coalesce(n.data, '{}')
        FROM new AS n
        ORDER BY n.n)
    UPDATE finished_jobs AS f
    SET events_count = f.events_count + w.events, last_event = coalesce(w.last, f.last_event)
    FROM (SELECT n.id, n.drop_on, count(*)::int AS events, max(n.number) AS last
          FROM new AS n
          GROUP BY n.id, n.drop_on) AS w
    WHERE f.id = w.id AND f.drop_on = w.drop_on;
    v_accepted := ARRAY (SELECT f.id FROM unnest(v_finished) AS f);
    PERFORM notify_watchers(v_accepted);
    RETURN QUERY SELECT a FROM unnest(v_accepted) AS a;
END $$;
