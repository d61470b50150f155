-- What operators do to jobs: cancel, retry, take over, count and remove them.
--
-- Promises: none of them waits longer than five seconds for another transaction.

-- The error of a call that waited for its lock_timeout. p_locked: the jobs that are locked, if that is known.
CREATE OR REPLACE FUNCTION raise_locked(p_what text, p_locked uuid[] DEFAULT '{}') RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    RAISE EXCEPTION 'no jobs were %: another transaction has locked one of them, or its idempotency key, for 5 seconds',
                    p_what
        USING ERRCODE = 'lock_not_available',
              DETAIL = CASE WHEN p_locked = '{}' THEN ''
                            ELSE 'Locked jobs: ' || array_to_string(p_locked[:10], ', ')
                                 || CASE WHEN p_locked[11] IS NULL THEN '' ELSE ', ...' END END,
              HINT = 'Call again when that transaction has ended, or leave out the job that it has locked.';
END $$;

-- Refuses a duration that cannot be added to a time.
CREATE OR REPLACE FUNCTION validate_duration(p_name text, p_value interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT
AS $$
BEGIN
    IF (p_value BETWEEN interval '0' AND interval '1000 years') IS NOT TRUE THEN
        RAISE EXCEPTION '% is %: it must be from 0 to 1000 years', p_name, coalesce(p_value::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Cancels jobs. A pending job ends as cancelled. For a claimed job cancellation is requested; the worker
-- sees it with its next heartbeat. The rows are locked first and then handled by their status: one
-- statement that removes pending rows and marks claimed rows would miss a row that is being claimed.
--
-- An acknowledgement may hold some of the rows and wait for others: then PostgreSQL ends one of the two, and this
-- one releases its rows, leaves them to the other for a moment and tries again. Only a few times: if the caller's
-- own transaction holds what the other one needs, trying again cannot help, and PostgreSQL must be able to end it.
--
-- A job that another transaction still has locked after five seconds does not keep the others: its status in the
-- answer is `locked`. If that is so for all of them, an error says so.
CREATE OR REPLACE FUNCTION cancel_jobs(p_ids uuid[]) RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[] := p_ids;
    v_locked uuid[];
    v_pending uuid[];
    v_waiting text[];
    v_claimed uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    FOR v_try IN 1..3 LOOP
        BEGIN
            PERFORM j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) ORDER BY j.id FOR UPDATE;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            v_ids := ARRAY (
                SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) ORDER BY j.id FOR UPDATE SKIP LOCKED);
            v_locked := ARRAY (
                SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) AND j.id <> ALL (v_ids));
            IF v_ids = '{}' AND v_locked <> '{}' THEN
                PERFORM raise_locked('cancelled', v_locked);
            END IF;
            EXIT;
        WHEN deadlock_detected THEN
            IF v_try = 3 THEN
                RAISE EXCEPTION 'jobs were not cancelled: a transaction that has locked one of them waits for '
                                'this transaction'
                    USING ERRCODE = 'deadlock_detected',
                          HINT = 'Cancel jobs before this transaction locks other rows, or in their own.';
            END IF;
        END;
        PERFORM pg_sleep(0.1 * v_try);
    END LOOP;
    SELECT array_agg(j.id), array_agg(DISTINCT j.ordering_key) FILTER (WHERE NOT j.holds_key)
    INTO v_pending, v_waiting
    FROM live_jobs AS j
    WHERE j.id = ANY (v_ids) AND j.status = 'pending';
    IF v_pending IS NOT NULL THEN
        PERFORM finish_jobs(v_pending, 'cancelled');
        -- While a waiting job was locked here, the handover of its key may have skipped it. The key is not
        -- assigned here: that would lock the key holder until the caller's transaction ends.
        INSERT INTO unassigned_keys (ordering_key)
        SELECT k.key FROM unnest(v_waiting) AS k (key) WHERE k.key IS NOT NULL;
        RETURN QUERY SELECT p, 'cancelled' FROM unnest(v_pending) AS p;
    END IF;
    UPDATE live_jobs AS j
    SET cancel_requested = true
    WHERE j.id = ANY (v_ids) AND j.lease_id IS NOT NULL;
    v_claimed := ARRAY (
        SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (v_ids) AND j.lease_id IS NOT NULL);
    PERFORM notify_cancellation(v_claimed);
    RETURN QUERY SELECT c, 'cancelling' FROM unnest(v_claimed) AS c;
    RETURN QUERY SELECT l, 'locked' FROM unnest(v_locked) AS l;
END $$;

-- Makes finished jobs pending again under their own ids, with no attempts used. A job whose idempotency key
-- another job has taken meanwhile is not reopened: the two must not both run. Nor is a job whose id is live again.
CREATE OR REPLACE FUNCTION retry_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off SET lock_timeout = '5s'
AS $$
DECLARE
    v_ids uuid[];
    v_lanes jsonb;
    v_keyed uuid[];
    v_owners uuid[];
    v_events jsonb;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM defer_keys();
    WITH locked AS MATERIALIZED (
        SELECT f.id, f.drop_on
        FROM finished_jobs AS f
        WHERE f.id = ANY (p_ids)
          AND NOT EXISTS (SELECT FROM live_jobs AS j WHERE j.id = f.id)
          AND NOT EXISTS (
              SELECT FROM idempotency_keys AS k
              WHERE k.job_type = f.job_type AND k.key = f.idempotency_key
                AND k.job_id <> f.id AND k.expires_at > keys_expired_before()
                AND NOT EXISTS (SELECT FROM freed_keys AS h WHERE h.holding_id = k.holding_id))
          AND NOT EXISTS (  -- of several jobs with one key, the last
              SELECT FROM finished_jobs AS o
              WHERE o.id = ANY (p_ids) AND o.job_type = f.job_type
                AND o.idempotency_key = f.idempotency_key AND o.seq > f.seq)
        ORDER BY f.id
        FOR UPDATE),
    reopened AS (
        DELETE FROM finished_jobs AS f
        USING locked AS l
        WHERE f.id = l.id AND f.drop_on = l.drop_on AND f.id = ANY (p_ids)
        RETURNING f.*),
    inserted AS (
        INSERT INTO live_jobs (
            id, queue, job_type, priority, data, max_attempts, created_at, events_count, last_error,
            idempotency_key, ordering_key, request_id, traceparent, keep, blockers)
        SELECT r.id, r.queue, r.job_type, r.priority, r.data, r.max_attempts, r.created_at,
               r.events_count, r.last_error, r.idempotency_key, r.ordering_key, r.request_id,
               r.traceparent, r.keep, (r.ordering_key IS NOT NULL)::int
        FROM reopened AS r
        ORDER BY r.seq
        RETURNING id, queue, job_type, priority, run_at, idempotency_key)
    SELECT array_agg(i.id),
           jsonb_agg(DISTINCT jsonb_build_array(
               i.queue, i.job_type, extract(epoch FROM i.run_at), i.priority)),
           array_agg(i.id) FILTER (WHERE i.idempotency_key IS NOT NULL),
           (SELECT jsonb_agg(jsonb_build_array(
                       r.id, greatest(r.drop_on, events_day(r.created_at, r.keep)),
                       live_events_day(r.created_at, r.keep)))
            FROM reopened AS r
            WHERE r.events_count > 0
              AND greatest(r.drop_on, events_day(r.created_at, r.keep))
                  <> live_events_day(r.created_at, r.keep))
    INTO v_ids, v_lanes, v_keyed, v_events
    FROM inserted AS i;
    IF v_keyed IS NOT NULL THEN
        -- A failed job has lost its key. It takes the key again, for the default lifetime.
        SELECT array_agg(j.id ORDER BY j.id),
               take_idempotency_keys(
                   array_agg(j.job_type::text ORDER BY j.id), array_agg(j.idempotency_key::text ORDER BY j.id),
                   array_agg(j.id ORDER BY j.id), array_agg(jsonb_hash_extended(j.data, 0) ORDER BY j.id),
                   array_agg(interval '7 days'))
        INTO v_keyed, v_owners
        FROM live_jobs AS j
        WHERE j.id = ANY (v_keyed);
        IF v_owners <> v_keyed THEN
            RAISE EXCEPTION 'another job has just taken the idempotency key of a job that was to be retried'
                USING ERRCODE = 'unique_violation', CONSTRAINT = 'idempotency_keys_pkey',
                      HINT = 'Retry again: that job is then left out.';
        END IF;
    END IF;
    IF v_events IS NOT NULL THEN
        PERFORM move_events(v_events);
    END IF;
    -- Their lanes may have been removed since.
    PERFORM add_lanes((
        SELECT jsonb_agg(DISTINCT jsonb_build_array(e -> 0, e -> 1, e -> 3)) FROM jsonb_array_elements(v_lanes) AS e));
    PERFORM wake_workers(v_lanes);
    RETURN QUERY SELECT i FROM unnest(v_ids) AS i;
EXCEPTION WHEN lock_not_available THEN
    PERFORM raise_locked('retried');
END $$;

-- Takes claimed jobs away from their workers, which are notified, and requeues them. The interrupted
-- attempt does not count. A job that another transaction still has locked after five seconds is left out, with a
-- warning; if there is no other, an error says so.
CREATE OR REPLACE FUNCTION takeover_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET lock_timeout = '5s'
AS $$
DECLARE
    v_ids uuid[];
    v_locked uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    BEGIN
        v_ids := ARRAY (
            SELECT j.id FROM live_jobs AS j
            WHERE j.id = ANY (p_ids) AND j.status = 'claimed'
            ORDER BY j.id
            FOR UPDATE);
    EXCEPTION WHEN lock_not_available THEN
        v_ids := ARRAY (
            SELECT j.id FROM live_jobs AS j
            WHERE j.id = ANY (p_ids) AND j.status = 'claimed'
            ORDER BY j.id
            FOR UPDATE SKIP LOCKED);
        v_locked := ARRAY (
            SELECT j.id FROM live_jobs AS j
            WHERE j.id = ANY (p_ids) AND j.status = 'claimed' AND j.id <> ALL (v_ids));
        IF v_ids = '{}' AND v_locked <> '{}' THEN
            PERFORM raise_locked('taken over', v_locked);
        ELSIF v_locked <> '{}' THEN
            RAISE WARNING 'jobs were not taken over, as another transaction has locked them: %',
                          array_to_string(v_locked, ', ');
        END IF;
    END;
    PERFORM requeue_jobs(v_ids, 'release');
    PERFORM notify_cancellation(v_ids);
    RETURN QUERY SELECT i FROM unnest(v_ids) AS i;
END $$;

-- The number of pending jobs: due, scheduled and blocked. NULL means any.
CREATE OR REPLACE FUNCTION pending_count(p_queue text DEFAULT NULL, p_job_type text DEFAULT NULL)
RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
    SELECT count(*)
    FROM live_jobs AS j
    WHERE j.status = 'pending'
      AND (p_queue IS NULL OR j.queue = p_queue)
      AND (p_job_type IS NULL OR j.job_type = p_job_type)
$$;

-- Removes finished jobs, and their events, that finished longer ago than p_older_than. Waits for nobody: a job
-- that another transaction has locked, because it retries or removes it, is left.
CREATE OR REPLACE FUNCTION clear_finished(
    p_older_than interval DEFAULT '0',
    p_statuses text[] DEFAULT '{completed,failed,cancelled}')
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off SET lock_timeout = '5s'
AS $$
DECLARE
    v_cleared bigint;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM validate_duration('p_older_than', p_older_than);
    WITH locked AS MATERIALIZED (
        SELECT f.id, f.drop_on
        FROM finished_jobs AS f
        WHERE f.completed_at <= clock_timestamp() - p_older_than AND f.status = ANY (p_statuses)
        FOR UPDATE SKIP LOCKED),
    cleared AS (
        DELETE FROM finished_jobs AS f
        USING locked AS l
        WHERE f.id = l.id AND f.drop_on = l.drop_on
        RETURNING f.id, f.events_count),
    freed AS (  -- as free_idempotency_keys does
        INSERT INTO freed_keys (holding_id, job_id)
        SELECT k.holding_id, k.job_id FROM idempotency_keys AS k JOIN cleared AS c ON c.id = k.job_id),
    cleared_events AS (
        DELETE FROM job_events AS e
        USING cleared AS c
        WHERE e.job_id = c.id AND c.events_count > 0)
    SELECT count(*) INTO v_cleared FROM cleared;
    RETURN v_cleared;
END $$;

-- Removes finished jobs, and their events, by id. Live jobs are not removed: cancel them first.
CREATE OR REPLACE FUNCTION remove_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off SET lock_timeout = '5s'
AS $$
DECLARE
    v_removed uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT f.id, f.drop_on
        FROM finished_jobs AS f
        WHERE f.id = ANY (p_ids)
        ORDER BY f.id
        FOR UPDATE),
    removed AS (
        DELETE FROM finished_jobs AS f
        USING locked AS l
        WHERE f.id = l.id AND f.drop_on = l.drop_on
        RETURNING f.id, f.events_count),
    removed_events AS (
        DELETE FROM job_events AS e
        USING removed AS r
        WHERE e.job_id = r.id AND r.events_count > 0)
    SELECT array_agg(r.id) INTO v_removed FROM removed AS r;
    PERFORM free_idempotency_keys(v_removed);
    RETURN QUERY SELECT r FROM unnest(v_removed) AS r;
EXCEPTION WHEN lock_not_available THEN
    PERFORM raise_locked('removed');
END $$;
