-- Acknowledge claimed jobs: complete, fail, release or stop them.
--
-- Owns the way out of live_jobs: into finished_jobs (decision 0001) or back to pending. Promises: at most
-- one accepted end per job (P2); every write carries its fence, the lease_id of its claim, and a stale
-- fence changes no row (P3); attempts never exceed max_attempts (P4). A function returns the ids it
-- accepted; a missing id was rejected, because its lease was lost or another transaction has locked it:
-- held_jobs tells which. With p_wait false a function waits for no other transaction. A lease goes with its last job.
--
-- Every join to live_jobs also has `id = ANY (ids)`, and only hash joins are allowed; whatever the caller or
-- the session forbids, one join method is (a plan without one costs 1e10, and a server with LLVM compiles
-- it for half a second). PostgreSQL 15 would plan some of the statements on every call. After autovacuum has
-- analyzed a drained queue, the planner expects one row in the table. It would then read the whole primary
-- key, including dead entries, instead of looking up 40 ids (measured: 31,197 pages instead of 135). The settings
-- are those of the entry points, for the functions that they call too: each costs a microsecond or two per call.

-- Locks the jobs whose fence is still valid. Returns their ids at the caller's positions, NULL for a
-- rejected one. Rows locked by others are skipped. With p_wait they are then waited for: see wait_for_leased.
CREATE OR REPLACE FUNCTION lock_leased(p_ids uuid[], p_lease_ids uuid[], p_wait boolean) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_locked uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    -- Each job once, so that a job given twice does not count as two.
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
    IF p_wait THEN
        v_locked := v_locked || wait_for_leased(p_ids, p_lease_ids, v_locked);
    END IF;
    IF v_locked = '{}' THEN
        RETURN array_fill(NULL::uuid, ARRAY[coalesce(cardinality(p_ids), 0)]);
    END IF;
    RETURN ARRAY (
        SELECT CASE WHEN a.holds AND a.first THEN a.id END
        FROM (SELECT u.id, u.n, j.id IS NOT NULL AS holds,
                     row_number() OVER (PARTITION BY u.id, u.lease_id ORDER BY u.n) = 1 AS first
              FROM unnest(p_ids, p_lease_ids) WITH ORDINALITY AS u (id, lease_id, n)
              -- By the fence too: a stale fence of the same job may come before the valid one.
              LEFT JOIN live_jobs AS j
                  ON j.id = u.id AND j.lease_id = u.lease_id AND j.id = ANY (v_locked)) AS a
        ORDER BY a.n);
END $$;

-- Waits for jobs that others have locked, at most one second in all, or a quarter of statement_timeout, which would end
-- the statement for the whole batch: a heartbeat releases its lock at once, a handler that completes the job in its own
-- transaction may not (decision 0004). Returns those that it could lock. p_except: those that the caller has locked.
CREATE OR REPLACE FUNCTION wait_for_leased(p_ids uuid[], p_lease_ids uuid[], p_except uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT SET lock_timeout = '1s'
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + least(
        interval '1 second', nullif(current_setting('statement_timeout'), '0')::interval / 4);
    v_left int;
    v_waiting record;
    v_locked uuid[] := '{}';
BEGIN
    FOR v_waiting IN
        SELECT DISTINCT h.id, h.lease_id
        FROM held_jobs(p_ids, p_lease_ids) AS h
        WHERE h.id <> ALL (p_except)
        ORDER BY h.id
    LOOP
        v_left := ceil(extract(epoch FROM v_until - clock_timestamp()) * 1000);
        EXIT WHEN v_left NOT BETWEEN 1 AND 1000;  -- also if the clock was set back
        PERFORM set_config('lock_timeout', v_left::text, true);  -- until the end of this function
        BEGIN
            PERFORM FROM live_jobs AS j
            WHERE j.id = ANY (ARRAY[v_waiting.id]) AND j.lease_id = v_waiting.lease_id
            FOR UPDATE;
            IF FOUND THEN
                v_locked := v_locked || v_waiting.id;
            END IF;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            NULL;  -- still locked: rejected; held_jobs still returns it, and the caller tries again
        END;
    END LOOP;
    RETURN v_locked;
END $$;

-- The jobs among these whose lease is still the caller's, also if another transaction has locked or changed
-- them and is still open. It waits for nobody. A job that was rejected and is held can be acknowledged when
-- that transaction has ended, unless that transaction took it or recovery came first (decision 0004).
CREATE OR REPLACE FUNCTION held_jobs(p_ids uuid[], p_lease_ids uuid[]) RETURNS TABLE (id uuid, lease_id uuid)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
AS $$
    SELECT j.id, j.lease_id
    FROM live_jobs AS j
    JOIN unnest(p_ids, p_lease_ids) AS a (id, lease_id) ON j.id = a.id AND j.lease_id = a.lease_id
    WHERE j.id = ANY (p_ids)
$$;

-- The time for which a job ran, in seconds by the worker's clock: one that makes no sense counts as 0 or as since the
-- claim.
CREATE OR REPLACE FUNCTION elapsed_time(p_seconds float8) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_seconds IS NOT NULL THEN make_interval(secs => least(greatest(p_seconds, 0), 1e9)) END;

-- Moves jobs to finished_jobs and hands over their ordering keys. The caller has locked them, or p_lease_ids has their
-- fences: then a job that another transaction has locked is waited for. Returns the ids of the jobs that were moved.
CREATE OR REPLACE FUNCTION finish_jobs(
    p_ids uuid[],
    p_status text,
    p_results jsonb[] DEFAULT NULL,
    p_errors text[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL,
    p_lease_ids uuid[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_completed boolean := p_status = 'completed';
    v_drop_on date := drop_day(p_status, NULL, v_now);  -- of most jobs
    v_ids uuid[];
    v_keys text[];
    v_seqs bigint[];
    v_events jsonb;
BEGIN
    WITH removed AS (
        DELETE FROM live_jobs AS j
        USING unnest(p_ids, p_results, p_errors, p_elapsed, p_lease_ids) AS a (id, result, error, elapsed, lease_id)
        WHERE j.id = a.id AND j.id = ANY (p_ids) AND (p_lease_ids IS NULL OR j.lease_id = a.lease_id)
        RETURNING j.*, a.result, a.error, a.elapsed),
    recorded AS (
        INSERT INTO finished_jobs (
            id, seq, run_at, created_at, claimed_at, started_at, completed_at, drop_on, lease_id,
            priority, attempts, max_attempts, claims, events_count, progress, cancel_requested,
            status, queue, job_type, data, current_stage, worker_id, last_error,
            request_id, traceparent, idempotency_key, ordering_key, keep, result, last_event)
        SELECT r.id, r.seq, r.run_at, r.created_at,
               CASE WHEN v_completed THEN r.claimed_at END,
               coalesce(r.started_at,
                        greatest(r.claimed_at, v_now - elapsed_time(r.elapsed)),
                        CASE WHEN v_completed THEN r.claimed_at END),
               v_now,
               CASE WHEN r.keep IS NULL THEN v_drop_on ELSE drop_day(p_status, r.keep, v_now) END,
               CASE WHEN v_completed THEN r.lease_id END,
               r.priority, r.attempts, r.max_attempts, r.claims, r.events_count,
               CASE WHEN v_completed THEN 100 ELSE r.progress END,
               r.cancel_requested, p_status, r.queue, r.job_type, r.data, r.current_stage,
               CASE WHEN v_completed THEN r.worker_id END,
               coalesce(r.error, r.last_error),
               r.request_id, r.traceparent, r.idempotency_key, r.ordering_key, r.keep, r.result,
               r.last_event
        FROM removed AS r
        WHERE NOT v_completed OR r.keep IS NULL OR r.keep > interval '0')
    SELECT array_agg(r.id),
           array_agg(r.ordering_key) FILTER (WHERE r.holds_key),
           array_agg(r.seq) FILTER (WHERE r.holds_key),
           jsonb_agg(jsonb_build_array(r.id, r.created_at, r.keep)) FILTER (WHERE r.events_count > 0)
    INTO v_ids, v_keys, v_seqs, v_events
    FROM removed AS r;
    IF v_keys IS NOT NULL THEN
        PERFORM hand_over_keys(v_keys, v_seqs);
    END IF;
    IF NOT v_completed THEN
        PERFORM free_idempotency_keys(p_ids);
    END IF;
    IF v_events IS NOT NULL THEN
        PERFORM move_events_of_finished(v_events, p_status, v_now);
    END IF;
    PERFORM notify_watchers(p_ids);
    RETURN coalesce(v_ids, '{}');
END $$;

-- complete_jobs for the runs of a worker, each job once, in one statement: it takes no locks first. It waits for a job that
-- another transaction has locked, ten milliseconds for each, and then raises lock_not_available: the worker sends the
-- whole batch to complete_jobs (decision 0045). Returns NULL if all were accepted, as nearly always, else their ids.
CREATE OR REPLACE FUNCTION complete_runs(
    p_ids uuid[], p_lease_ids uuid[], p_results jsonb[] DEFAULT NULL, p_elapsed float8[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan SET lock_timeout = '10ms'
AS $$
DECLARE
    v_accepted uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    v_accepted := finish_jobs(p_ids, 'completed', p_results, NULL, p_elapsed, p_lease_ids);
    RETURN CASE WHEN cardinality(v_accepted) < cardinality(p_ids) THEN v_accepted END;
END $$;

-- Completes jobs. p_elapsed: seconds since each job started, by the worker's monotonic clock. p_again is
-- for a client that did not receive the answer and resends: jobs that this lease has already completed are
-- accepted.
CREATE OR REPLACE FUNCTION complete_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_results jsonb[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL,
    p_again boolean DEFAULT false,
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
    PERFORM finish_jobs(v_accepted, 'completed', p_results, NULL, p_elapsed);
    PERFORM remove_ended_leases(p_lease_ids);
    RETURN QUERY SELECT m FROM unnest(v_accepted) AS m WHERE m IS NOT NULL;
    IF p_again THEN
        RETURN QUERY
        SELECT f.id
        FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
        JOIN finished_jobs AS f ON f.id = a.id AND f.lease_id = a.lease_id
        WHERE f.id = ANY (p_ids) AND f.id <> ALL (array_remove(v_accepted, NULL));
    END IF;
END $$;

-- Fails jobs. A job is retried at p_retry_at, or after p_retry_in, while it has attempts left; NULL in both
-- means no retry. If both arrays are NULL, every job is retried at once. A job whose cancellation was
-- requested ends as cancelled instead.
CREATE OR REPLACE FUNCTION fail_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_errors text[],
    p_retry_at timestamptz[] DEFAULT NULL,
    p_retry_in interval[] DEFAULT NULL,
    p_elapsed float8[] DEFAULT NULL,
    p_tracebacks text[] DEFAULT NULL,
    p_wait boolean DEFAULT true)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_accepted uuid[] := lock_leased(p_ids, p_lease_ids, p_wait);
    v_now timestamptz;
    v_failed uuid[];
    v_cancelled uuid[];
    v_lanes jsonb;
    v_missing jsonb;
BEGIN
    WITH reported AS (
        UPDATE live_jobs AS j
        SET events_count = j.events_count + 1
        FROM unnest(v_accepted, p_errors, p_tracebacks) AS a (id, error, traceback)
        WHERE j.id = a.id AND j.id = ANY (v_accepted)
        RETURNING j.id, j.attempts, j.worker_id, j.created_at, j.keep, a.error, a.traceback)
    INSERT INTO job_events (job_id, attempt, drop_on, kind, data)
    SELECT r.id, r.attempts, live_events_day(r.created_at, r.keep), 'error',
           jsonb_strip_nulls(jsonb_build_object(
               'error', r.error, 'traceback', r.traceback, 'worker', r.worker_id))
    FROM reported AS r;
    -- Not before: the statement may have waited, and a due time of before the wait may be below the present heads.
    v_now := clock_timestamp();

    WITH retried AS (
        UPDATE live_jobs AS j
        SET status = 'pending',
            -- One outcome with a delay that no timestamp can hold must not refuse the others.
            run_at = least(greatest(coalesce(a.retry_at, v_now + least(greatest(a.retry_in, interval '0'),
                                                                       interval '7000 years')), v_now),
                           timestamptz '9998-12-31 00:00+00'),
            last_error = coalesce(a.error, j.last_error),
            worker_id = NULL,
            lease_id = NULL,
            claimed_at = NULL,
            started_at = NULL
        FROM unnest(v_accepted, p_errors, p_retry_at, p_retry_in) AS a (id, error, retry_at, retry_in)
        WHERE j.id = a.id AND j.id = ANY (v_accepted)
          AND j.attempts < j.max_attempts
          AND NOT j.cancel_requested
          AND (a.retry_at IS NOT NULL OR a.retry_in IS NOT NULL
               OR (p_retry_at IS NULL AND p_retry_in IS NULL))
        RETURNING j.id, j.queue, j.job_type, j.priority, j.run_at)
    SELECT jsonb_agg(jsonb_build_array(r.queue, r.job_type, extract(epoch FROM r.run_at))),
           jsonb_agg(DISTINCT jsonb_build_array(r.queue, r.job_type, r.priority))
               FILTER (WHERE is_lane_missing(r.queue, r.job_type, r.priority))
    INTO v_lanes, v_missing
    FROM retried AS r;
    PERFORM add_lanes(v_missing);
    PERFORM wake_workers(v_lanes);
    PERFORM notify_watchers(v_accepted);

    SELECT array_agg(CASE WHEN NOT j.cancel_requested THEN j.id END ORDER BY a.n),
           array_agg(CASE WHEN j.cancel_requested THEN j.id END ORDER BY a.n)
    INTO v_failed, v_cancelled
    FROM unnest(v_accepted) WITH ORDINALITY AS a (id, n)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id IS NOT NULL AND j.id = ANY (v_accepted);
    IF array_remove(v_failed, NULL) <> '{}' THEN
        PERFORM finish_jobs(v_failed, 'failed', NULL, p_errors, p_elapsed);
    END IF;
    IF array_remove(v_cancelled, NULL) <> '{}' THEN
        PERFORM finish_jobs(v_cancelled, 'cancelled', NULL, p_errors, p_elapsed);
    END IF;
    PERFORM remove_ended_leases(p_lease_ids);
    RETURN QUERY SELECT m FROM unnest(v_accepted) AS m WHERE m IS NOT NULL;
END $$;

-- Releases jobs: they are pending again, after p_delay, and the attempt does not count. A job whose
-- cancellation was requested ends as cancelled instead.
CREATE OR REPLACE FUNCTION release_jobs(
    p_ids uuid[], p_lease_ids uuid[], p_delay interval DEFAULT '0', p_wait boolean DEFAULT true)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_accepted uuid[];
BEGIN
    PERFORM validate_duration('p_delay', p_delay);
    v_accepted := array_remove(lock_leased(p_ids, p_lease_ids, p_wait), NULL);
    PERFORM requeue_jobs(v_accepted, 'release', NULL, p_delay);
    PERFORM remove_ended_leases(p_lease_ids);
    RETURN QUERY SELECT m FROM unnest(v_accepted) AS m;
END $$;

-- Requeues jobs that the caller has locked, or ends those that may not run again.
--   release: the attempt does not count.
--   recover: the attempt does not count if the job never started, at most ten times, so that a job that kills
--            its worker before `started_at` is written still ends (decision 0020).
CREATE OR REPLACE FUNCTION requeue_jobs(
    p_ids uuid[], p_why text, p_error text DEFAULT NULL, p_delay interval DEFAULT '0')
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_lanes jsonb;
    v_missing jsonb;
    v_requeued int;
    v_ended uuid[];
BEGIN
    WITH requeued AS (
        UPDATE live_jobs AS j
        SET status = 'pending',
            run_at = CASE WHEN p_delay > interval '0' THEN clock_timestamp() + p_delay
                          ELSE requeue_at(j.queue, j.job_type, j.priority, j.run_at) END,
            attempts = j.attempts - (
                p_why = 'release' OR (j.started_at IS NULL AND j.claims - j.attempts < 10))::int,
            claims = j.claims - (p_why = 'release')::int,
            last_error = coalesce(p_error || ' (' || j.worker_id || ')', j.last_error),
            worker_id = NULL,
            lease_id = NULL,
            claimed_at = NULL,
            started_at = NULL
        WHERE j.id = ANY (p_ids)
          AND NOT j.cancel_requested
          AND (p_why = 'release'
               OR j.attempts < j.max_attempts
               OR (j.started_at IS NULL AND j.claims - j.attempts < 10))
        RETURNING j.id, j.queue, j.job_type, j.priority, j.run_at)
    SELECT jsonb_agg(jsonb_build_array(r.queue, r.job_type, extract(epoch FROM r.run_at))),
           jsonb_agg(DISTINCT jsonb_build_array(r.queue, r.job_type, r.priority))
               FILTER (WHERE is_lane_missing(r.queue, r.job_type, r.priority)),
           count(*)
    INTO v_lanes, v_missing, v_requeued
    FROM requeued AS r;
    PERFORM add_lanes(v_missing);
    PERFORM wake_workers(v_lanes);
    PERFORM notify_watchers(p_ids);
    IF v_requeued = cardinality(p_ids) THEN
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

-- Ends claimed jobs as cancelled: their handlers were stopped, or requested it.
CREATE OR REPLACE FUNCTION stop_jobs(
    p_ids uuid[], p_lease_ids uuid[], p_reasons text[] DEFAULT NULL, p_wait boolean DEFAULT true)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_accepted uuid[] := lock_leased(p_ids, p_lease_ids, p_wait);
BEGIN
    PERFORM finish_jobs(v_accepted, 'cancelled', NULL, p_reasons);
    PERFORM remove_ended_leases(p_lease_ids);
    RETURN QUERY SELECT m FROM unnest(v_accepted) AS m WHERE m IS NOT NULL;
END $$;
