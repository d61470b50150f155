-- Read jobs and events by id, without planning a search of every partition.
--
-- A statement on the view `jobs` plans for all partitions of finished_jobs: 4 ms, and 10 to 30 ms in a new session,
-- which has to load each of them. Drivers that prepare nothing, and poolers, pay that for every read. These functions
-- search live_jobs, then the partitions where the job most likely is, one at a time, then the others.
--
-- They are STABLE: all their searches use the snapshot of the calling statement, so a job that moves from one table
-- to the other meanwhile is found.

-- The days on which a finished job most likely may be dropped. The id of a job holds the time at which it was made;
-- most jobs finish on that day and have the default retention. Only an order of search: an id may hold anything.
CREATE OR REPLACE FUNCTION likely_days(p_id uuid) RETURNS date[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
AS $$
DECLARE
    v_id text := replace(p_id::text, '-', '');
    v_day int;
BEGIN
    IF substr(v_id, 13, 1) <> '7' THEN
        RETURN '{}';
    END IF;
    v_day := least(('x' || left(v_id, 12))::bit(48)::bigint / 86400000, 100000);
    RETURN ARRAY[drop_day('completed', NULL, to_timestamp(v_day * 86400.0)),
                 drop_day('failed', NULL, to_timestamp(v_day * 86400.0)),
                 drop_day('completed', NULL, to_timestamp((v_day + 1) * 86400.0))];
END $$;

-- The row of a finished job; NULL if there is none.
CREATE OR REPLACE FUNCTION find_finished(p_id uuid) RETURNS finished_jobs
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_job finished_jobs;
    v_partition regclass;
    v_day date;
BEGIN
    FOREACH v_day IN ARRAY likely_days(p_id) LOOP
        v_partition := to_regclass(partition_name('finished_jobs', v_day));
        IF v_partition IS NOT NULL THEN
            EXECUTE format('SELECT * FROM %s WHERE id = $1', v_partition) INTO v_job USING p_id;
            IF v_job.id IS NOT NULL THEN
                RETURN v_job;
            END IF;
        END IF;
    END LOOP;
    SELECT f.* INTO v_job FROM finished_jobs AS f WHERE f.id = p_id;
    RETURN v_job;
END $$;

-- Rows of finished jobs: of one job from where it most likely is, of several from a search of all partitions whose
-- plan the session keeps.
CREATE OR REPLACE FUNCTION find_all_finished(p_ids uuid[]) RETURNS SETOF finished_jobs
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_job finished_jobs;
BEGIN
    IF cardinality(p_ids) = 1 THEN
        v_job := find_finished(p_ids[1]);
        IF v_job.id IS NOT NULL THEN
            RETURN NEXT v_job;
        END IF;
    ELSE
        RETURN QUERY SELECT f.* FROM finished_jobs AS f WHERE f.id = ANY (p_ids);
    END IF;
END $$;

-- Jobs by id, live or finished, in any order.
CREATE OR REPLACE FUNCTION get_jobs(p_ids uuid[]) RETURNS SETOF jobs
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off
AS $$
DECLARE
    v_live int;
BEGIN
    RETURN QUERY
    SELECT j.id, j.seq, j.queue::text, j.job_type::text, j.priority::int,
           CASE WHEN j.status = 'claimed' AND j.started_at IS NOT NULL THEN 'running' ELSE j.status END,
           j.data::jsonb, j.progress, j.current_stage, j.events_count,
           j.worker_id, j.lease_id, (SELECT l.expires_at FROM leases AS l WHERE l.lease_id = j.lease_id),
           j.claims, j.claimed_at,
           j.run_at::timestamptz, j.created_at, j.started_at, NULL::timestamptz,
           j.attempts, j.max_attempts::int, j.last_error, j.request_id::text, j.traceparent::text,
           j.idempotency_key::text, j.ordering_key::text, j.holds_key, j.blockers, j.cancel_requested,
           j.keep::interval, NULL::jsonb
    FROM live_jobs AS j
    WHERE j.id = ANY (p_ids);
    GET DIAGNOSTICS v_live = ROW_COUNT;
    IF v_live < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT f.id, f.seq, f.queue, f.job_type, f.priority, f.status, f.data, f.progress, f.current_stage,
               f.events_count, f.worker_id, f.lease_id, NULL::timestamptz, f.claims, f.claimed_at,
               f.run_at, f.created_at, f.started_at, f.completed_at,
               f.attempts, f.max_attempts, f.last_error, f.request_id, f.traceparent,
               f.idempotency_key, f.ordering_key, false, 0, f.cancel_requested, f.keep, f.result
        FROM find_all_finished(p_ids) AS f;
    END IF;
END $$;

-- Those of these ids whose jobs are finished.
CREATE OR REPLACE FUNCTION finished_ids(p_ids uuid[]) RETURNS uuid[]
LANGUAGE sql STABLE SET search_path FROM CURRENT SET jit = off
AS $$ SELECT ARRAY (SELECT f.id FROM find_all_finished(p_ids) AS f) $$;

-- The events of a job after the event p_after, oldest first.
CREATE OR REPLACE FUNCTION get_events(p_job_id uuid, p_after bigint DEFAULT 0) RETURNS SETOF job_events
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    f finished_jobs;
    v_days date[];
    v_day date;
BEGIN
    SELECT ARRAY[events_day(j.created_at, j.keep), date '9999-12-31'] INTO v_days
    FROM live_jobs AS j
    WHERE j.id = p_job_id;
    IF NOT FOUND THEN
        f := find_finished(p_job_id);
        v_days := ARRAY[greatest(events_day(f.created_at, f.keep), f.drop_on)];
    END IF;
    -- Values in the text, not parameters: then one partition is planned for.
    FOREACH v_day IN ARRAY v_days LOOP
        RETURN QUERY EXECUTE format(
            'SELECT * FROM job_events WHERE drop_on = %L AND job_id = $1 AND event_id > $2 ORDER BY event_id', v_day)
        USING p_job_id, p_after;
    END LOOP;
END $$;
