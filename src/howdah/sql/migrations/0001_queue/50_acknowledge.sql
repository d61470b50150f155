-- Writes about claimed jobs. Each carries the fence of its very claim, the lease_id; a stale fence
-- changes no row, and what an answer does not name was refused.
--
-- Every join to live_jobs here also says `id = ANY (ids)`, and only hash joins are allowed. Once
-- autovacuum has analysed a drained queue, the planner takes the table for one row and would rather
-- read all of its primary key, dead entries too, than look 40 ids up (measured: 31,197 pages, not 135).

-- Locks the jobs whose fence still holds and returns their ids in the caller's places, NULL for a
-- refused one. Rows that somebody else has locked are skipped first and then waited for, one second
-- at the most: a heartbeat lets go at once, a handler that completes in a transaction of its own may
-- not, and its neighbours must not pay for it.
CREATE FUNCTION lock_leased(p_ids uuid[], p_lease_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET lock_timeout = '1s'
AS $$
DECLARE
    v_locked uuid[];
BEGIN
    -- Each job once, so that one that is named twice does not pass for two.
    v_locked := ARRAY (
        SELECT j.id
        FROM live_jobs AS j
        WHERE j.id = ANY (p_ids)
          AND (j.id, j.lease_id) IN (
              SELECT a.id, a.lease_id FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id))
        FOR UPDATE OF j SKIP LOCKED);
    IF cardinality(v_locked) = cardinality(p_ids) THEN
        RETURN p_ids;
    END IF;
    BEGIN
        PERFORM j.id
        FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
        JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
        WHERE j.id = ANY (p_ids)
        ORDER BY j.id
        FOR UPDATE OF j;
        v_locked := ARRAY (
            SELECT j.id
            FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
            JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
            WHERE j.id = ANY (p_ids));
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        NULL;  -- still busy: refused, and the lease decides what becomes of it
    END;
    RETURN ARRAY (
        SELECT CASE WHEN a.holds AND a.first THEN a.id END
        FROM (SELECT u.id, u.n, j.id IS NOT NULL AS holds,
                     row_number() OVER (PARTITION BY u.id, u.lease_id ORDER BY u.n) = 1 AS first
              FROM unnest(p_ids, p_lease_ids) WITH ORDINALITY AS u (id, lease_id, n)
              -- Again by the fence: a stale one of the same job may stand before it.
              LEFT JOIN live_jobs AS j
                  ON j.id = u.id AND j.lease_id = u.lease_id AND j.id = ANY (v_locked)) AS a
        ORDER BY a.n);
END $$;

-- Moves jobs that the caller has locked to their last place, and hands their keys on.
CREATE FUNCTION finish_jobs(
    p_ids uuid[],
    p_status text,
    p_results jsonb[] DEFAULT NULL,
    p_errors text[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_keys text[];
    v_seqs bigint[];
BEGIN
    WITH gone AS (
        DELETE FROM live_jobs AS j
        USING unnest(p_ids, p_results, p_errors, p_elapsed) AS a (id, result, error, elapsed)
        WHERE j.id = a.id AND j.id = ANY (p_ids)
        RETURNING j.*, a.result, a.error, a.elapsed),
    kept AS (
        INSERT INTO finished_jobs (
            id, seq, run_at, created_at, claimed_at, started_at, completed_at, drop_on, lease_id,
            priority, attempts, max_attempts, claims, events_count, progress, cancel_requested,
            status, queue, job_type, data, current_stage, worker_id, last_error,
            request_id, traceparent, idempotency_key, ordering_key, keep, result)
        SELECT g.id, g.seq, g.run_at, g.created_at,
               CASE WHEN p_status = 'completed' THEN g.claimed_at END,
               coalesce(g.started_at,
                        greatest(g.claimed_at, v_now - make_interval(secs => g.elapsed)),
                        CASE WHEN p_status = 'completed' THEN g.claimed_at END),
               v_now,
               ((v_now + CASE WHEN p_status = 'completed' THEN coalesce(g.keep, interval '7 days')
                              ELSE coalesce(nullif(g.keep, interval '0'), interval '30 days') END)
                AT TIME ZONE 'UTC')::date + 1,
               CASE WHEN p_status = 'completed' THEN g.lease_id END,
               g.priority, g.attempts, g.max_attempts, g.claims, g.events_count,
               CASE WHEN p_status = 'completed' THEN 100 ELSE g.progress END,
               g.cancel_requested, p_status, g.queue, g.job_type, g.data, g.current_stage,
               CASE WHEN p_status = 'completed' THEN g.worker_id END,
               coalesce(g.error, g.last_error),
               g.request_id, g.traceparent, g.idempotency_key, g.ordering_key, g.keep, g.result
        FROM gone AS g
        WHERE p_status <> 'completed' OR g.keep IS NULL OR g.keep > interval '0')
    SELECT array_agg(g.ordering_key), array_agg(g.seq) INTO v_keys, v_seqs
    FROM gone AS g
    WHERE g.holds_key;
    IF v_keys IS NOT NULL THEN
        PERFORM hand_over_keys(v_keys, v_seqs);
    END IF;
    PERFORM tell_watchers(p_ids);
END $$;

-- Completes jobs. p_elapsed: seconds since each was started, by the worker's monotonic clock.
-- With p_again a completion whose outcome was never heard is repeated: what this very lease has
-- completed already is answered as accepted.
CREATE FUNCTION complete_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_results jsonb[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL,
    p_again boolean DEFAULT false)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    v_mine uuid[] := lock_leased(p_ids, p_lease_ids);
BEGIN
    PERFORM finish_jobs(v_mine, 'completed', p_results, NULL, p_elapsed);
    RETURN QUERY SELECT m FROM unnest(v_mine) AS m WHERE m IS NOT NULL;
    IF p_again THEN
        RETURN QUERY
        SELECT f.id
        FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
        JOIN finished_jobs AS f ON f.id = a.id AND f.lease_id = a.lease_id
        WHERE f.id = ANY (p_ids) AND f.id <> ALL (array_remove(v_mine, NULL));
    END IF;
END $$;

-- Fails jobs. Each is tried again at p_retry_at, or after p_retry_in, while it has attempts left;
-- a NULL in its place there means no retry. With neither array: again at once.
-- A job that was to be cancelled ends as cancelled instead.
CREATE FUNCTION fail_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_errors text[],
    p_retry_at timestamptz[] DEFAULT NULL,
    p_retry_in interval[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL,
    p_tracebacks text[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_mine uuid[] := lock_leased(p_ids, p_lease_ids);
    v_failed uuid[];
    v_cancelled uuid[];
    v_lanes jsonb;
BEGIN
    WITH reported AS (
        UPDATE live_jobs AS j
        SET events_count = j.events_count + 1
        FROM unnest(v_mine, p_errors, p_tracebacks) AS a (id, error, traceback)
        WHERE j.id = a.id AND j.id = ANY (v_mine)
        RETURNING j.id, j.attempts, j.worker_id, a.error, a.traceback)
    INSERT INTO job_events (job_id, attempt, kind, data)
    SELECT r.id, r.attempts, 'error',
           jsonb_strip_nulls(jsonb_build_object(
               'error', r.error, 'traceback', r.traceback, 'worker', r.worker_id))
    FROM reported AS r;

    WITH retried AS (
        UPDATE live_jobs AS j
        SET status = 'pending',
            run_at = least(greatest(coalesce(a.retry_at, v_now + a.retry_in), v_now),
                           timestamptz '9998-12-31 00:00+00'),
            last_error = coalesce(a.error, j.last_error),
            worker_id = NULL,
            lease_id = NULL,
            lease_expires_at = NULL,
            claimed_at = NULL,
            started_at = NULL
        FROM unnest(v_mine, p_errors, p_retry_at, p_retry_in) AS a (id, error, retry_at, retry_in)
        WHERE j.id = a.id AND j.id = ANY (v_mine)
          AND j.attempts < j.max_attempts
          AND NOT j.cancel_requested
          AND (a.retry_at IS NOT NULL OR a.retry_in IS NOT NULL
               OR (p_retry_at IS NULL AND p_retry_in IS NULL))
        RETURNING j.id, j.queue, j.job_type, j.run_at)
    SELECT jsonb_agg(jsonb_build_array(r.queue, r.job_type, extract(epoch FROM r.run_at))) INTO v_lanes
    FROM retried AS r;
    PERFORM wake_workers(v_lanes);
    PERFORM tell_watchers(v_mine);

    -- Not status = 'claimed': the planner would take that for an invitation to read the whole partial
    -- index of claimed jobs.
    SELECT array_agg(CASE WHEN NOT j.cancel_requested THEN j.id END ORDER BY a.n),
           array_agg(CASE WHEN j.cancel_requested THEN j.id END ORDER BY a.n)
    INTO v_failed, v_cancelled
    FROM unnest(v_mine) WITH ORDINALITY AS a (id, n)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id IS NOT NULL AND j.id = ANY (v_mine);
    IF array_remove(v_failed, NULL) <> '{}' THEN
        PERFORM finish_jobs(v_failed, 'failed', NULL, p_errors, p_elapsed);
    END IF;
    IF array_remove(v_cancelled, NULL) <> '{}' THEN
        PERFORM finish_jobs(v_cancelled, 'cancelled', NULL, p_errors, p_elapsed);
    END IF;
    RETURN QUERY SELECT m FROM unnest(v_mine) AS m WHERE m IS NOT NULL;
END $$;

-- Gives jobs back untouched: the attempt does not count. p_delay postpones them.
-- A job that was to be cancelled ends as cancelled instead.
CREATE FUNCTION release_jobs(p_ids uuid[], p_lease_ids uuid[], p_delay interval DEFAULT '0')
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_mine uuid[] := array_remove(lock_leased(p_ids, p_lease_ids), NULL);
BEGIN
    PERFORM return_jobs(v_mine, 'release', NULL, p_delay);
    RETURN QUERY SELECT m FROM unnest(v_mine) AS m;
END $$;

-- Puts jobs that the caller has locked back into their lanes, or ends those that may not go back.
--   release: the attempt is given back.
--   recover: it is given back if the job never started, ten times at the most, so that a job which
--            kills its worker before it can say so still comes to an end.
CREATE FUNCTION return_jobs(p_ids uuid[], p_why text, p_error text DEFAULT NULL, p_delay interval DEFAULT '0')
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lanes jsonb;
    v_returned int;
    v_ended uuid[];
BEGIN
    WITH returned AS (
        UPDATE live_jobs AS j
        SET status = 'pending',
            run_at = CASE WHEN p_delay > interval '0' THEN v_now + p_delay
                          ELSE due_again(j.queue, j.job_type, j.priority, j.run_at) END,
            attempts = j.attempts - (
                p_why = 'release' OR (j.started_at IS NULL AND j.claims - j.attempts < 10))::int,
            claims = j.claims - (p_why = 'release')::int,
            last_error = coalesce(p_error || ' (' || j.worker_id || ')', j.last_error),
            worker_id = NULL,
            lease_id = NULL,
            lease_expires_at = NULL,
            claimed_at = NULL,
            started_at = NULL
        WHERE j.id = ANY (p_ids)
          AND NOT j.cancel_requested
          AND (p_why = 'release'
               OR j.attempts < j.max_attempts
               OR (j.started_at IS NULL AND j.claims - j.attempts < 10))
        RETURNING j.id, j.queue, j.job_type, j.run_at)
    SELECT jsonb_agg(jsonb_build_array(r.queue, r.job_type, extract(epoch FROM r.run_at))), count(*)
    INTO v_lanes, v_returned
    FROM returned AS r;
    PERFORM wake_workers(v_lanes);
    PERFORM tell_watchers(p_ids);
    IF v_returned = cardinality(p_ids) THEN
        RETURN;
    END IF;

    v_ended := ARRAY (
        SELECT j.id FROM live_jobs AS j
        WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL AND NOT j.cancel_requested);
    IF v_ended <> '{}' THEN
        PERFORM finish_jobs(v_ended, 'failed', NULL, array_fill(p_error, ARRAY[cardinality(v_ended)]));
    END IF;
    v_ended := ARRAY (
        SELECT j.id FROM live_jobs AS j
        WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL AND j.cancel_requested);
    IF v_ended <> '{}' THEN
        PERFORM finish_jobs(v_ended, 'cancelled');
    END IF;
END $$;

-- Extends leases to now + p_lease, also an expired one that nobody recovered. Says of each id whether
-- it was extended and whether it is still the caller's: a row that its own handler's transaction has
-- locked is skipped, not lost. p_elapsed: seconds since the job was started, NULL if it was not.
CREATE FUNCTION extend_jobs(
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
    WITH kept AS MATERIALIZED (
        SELECT j.id, a.elapsed
        FROM unnest(p_ids, p_lease_ids, p_elapsed) AS a (id, lease_id, elapsed)
        JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
        WHERE j.id = ANY (p_ids)
        FOR NO KEY UPDATE OF j SKIP LOCKED)
    UPDATE live_jobs AS j
    SET lease_expires_at = v_now + p_lease,
        started_at = coalesce(j.started_at,
            CASE WHEN k.elapsed IS NOT NULL
                 THEN greatest(j.claimed_at, v_now - make_interval(secs => k.elapsed)) END)
    FROM kept AS k
    WHERE j.id = k.id AND j.id = ANY (p_ids);
    RETURN QUERY
    SELECT a.id,
           coalesce(j.lease_expires_at = v_now + p_lease, false),
           j.id IS NOT NULL,
           coalesce(j.cancel_requested, false)
    FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id AND j.id = ANY (p_ids);
END $$;

-- Says that jobs were started. A worker writes this before it runs a job that was claimed before, so
-- that one which kills its worker uses up its attempts.
CREATE FUNCTION start_jobs(p_ids uuid[], p_lease_ids uuid[]) RETURNS SETOF uuid
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

-- Reports progress: percent, which never goes back within an attempt, and stage; NULL leaves one as
-- it was. Answers like extend_jobs.
CREATE FUNCTION report_progress(
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
    v_kept uuid[];
BEGIN
    WITH kept AS MATERIALIZED (
        SELECT j.id, a.progress, a.stage
        FROM unnest(p_ids, p_lease_ids, p_progress, p_stages) AS a (id, lease_id, progress, stage)
        JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
        WHERE j.id = ANY (p_ids)
        FOR NO KEY UPDATE OF j SKIP LOCKED),
    reported AS (
        UPDATE live_jobs AS j
        SET progress = greatest(j.progress, CASE WHEN k.progress > 100 THEN 100 ELSE k.progress END),
            current_stage = coalesce(left(k.stage, 100), j.current_stage),
            started_at = coalesce(j.started_at, clock_timestamp())
        FROM kept AS k
        WHERE j.id = k.id AND j.id = ANY (p_ids)
        RETURNING j.id)
    SELECT array_agg(r.id) INTO v_kept FROM reported AS r;
    PERFORM tell_watchers(v_kept);
    RETURN QUERY
    SELECT a.id, coalesce(j.id = ANY (v_kept), false), j.id IS NOT NULL, coalesce(j.cancel_requested, false)
    FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id AND j.id = ANY (p_ids);
END $$;

-- Appends events to the durable stream of claimed jobs; an id may appear more than once.
CREATE FUNCTION add_events(p_ids uuid[], p_lease_ids uuid[], p_kinds text[], p_datas jsonb[])
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off
AS $$
DECLARE
    v_mine uuid[] := lock_leased(p_ids, p_lease_ids);
BEGIN
    RETURN QUERY
    WITH written AS (
        INSERT INTO job_events (job_id, attempt, kind, data)
        SELECT j.id, j.attempts, e.kind, coalesce(e.data, '{}')
        FROM unnest(p_ids, p_lease_ids, p_kinds, p_datas) WITH ORDINALITY AS e (id, lease_id, kind, data, n)
        JOIN live_jobs AS j ON j.id = e.id AND j.lease_id = e.lease_id
        WHERE e.id = ANY (v_mine) AND j.id = ANY (v_mine)
        ORDER BY e.n
        RETURNING job_id),
    counted AS (
        UPDATE live_jobs AS j
        SET events_count = j.events_count + w.events
        FROM (SELECT job_id, count(*)::int AS events FROM written GROUP BY job_id) AS w
        WHERE j.id = w.job_id AND j.id = ANY (v_mine)
        RETURNING j.id)
    SELECT c.id FROM counted AS c;
    PERFORM tell_watchers(v_mine);
END $$;
