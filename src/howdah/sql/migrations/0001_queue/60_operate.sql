-- What operators and maintenance do to jobs.

-- Returns jobs whose lease ran out (p_timeout NULL), or that were claimed longer ago than p_timeout,
-- to their lanes; ends those without an attempt left as failed. Returns how many it found.
CREATE FUNCTION recover_stale_jobs(p_timeout interval DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_stale uuid[];
BEGIN
    v_stale := lock_stale(
        p_timeout, p_limit, '-infinity',
        CASE WHEN p_timeout IS NULL THEN clock_timestamp() ELSE 'infinity' END);
    IF v_stale <> '{}' THEN
        PERFORM return_jobs(v_stale, 'recover', 'the lease ran out; the worker stopped or was cut off');
    END IF;
    RETURN cardinality(v_stale);
END $$;

-- Locks stale jobs whose lease runs out between p_from and p_until: parameters, because an index cannot
-- be searched by a clock that ticks, and every job in flight would be looked at.
CREATE FUNCTION lock_stale(p_timeout interval, p_limit int, p_from timestamptz, p_until timestamptz)
RETURNS uuid[]
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    SELECT ARRAY (
        SELECT stale.id
        FROM (SELECT DISTINCT l.queue, l.job_type FROM lanes AS l) AS t
        CROSS JOIN LATERAL (
            SELECT j.id
            FROM live_jobs AS j
            WHERE j.status = 'claimed' AND j.queue = t.queue AND j.job_type = t.job_type
              AND j.lease_expires_at BETWEEN p_from AND p_until
              AND (p_timeout IS NULL OR j.claimed_at <= clock_timestamp() - p_timeout)
            ORDER BY j.lease_expires_at
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS stale
        LIMIT p_limit)
$$;

-- Cancels: a pending job ends as cancelled; a claimed one is asked to stop, and the worker hears of it
-- with its next heartbeat. Locks first and branches on what it holds: a statement that removes pending
-- and marks claimed rows at once misses a row that is being claimed.
CREATE FUNCTION cancel_jobs(p_ids uuid[]) RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
DECLARE
    v_pending uuid[];
    v_waiting text[];
    v_claimed uuid[];
BEGIN
    LOOP
        BEGIN
            PERFORM j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) ORDER BY j.id FOR UPDATE;
            EXIT;
        EXCEPTION WHEN deadlock_detected THEN
            NULL;  -- an acknowledgement has some and waits for ours: let go, and it will too
        END;
    END LOOP;
    SELECT array_agg(j.id), array_agg(DISTINCT j.ordering_key) FILTER (WHERE NOT j.holds_key)
    INTO v_pending, v_waiting
    FROM live_jobs AS j
    WHERE j.id = ANY (p_ids) AND j.status = 'pending';
    IF v_pending IS NOT NULL THEN
        PERFORM finish_jobs(v_pending, 'cancelled');
        -- A finisher may have passed a waiting job by because we had it locked. Not settled here: that
        -- would hold on to the key's holder until the caller's transaction ends.
        INSERT INTO unsettled (ordering_key)
        SELECT k.key FROM unnest(v_waiting) AS k (key) WHERE k.key IS NOT NULL;
        RETURN QUERY SELECT p, 'cancelled' FROM unnest(v_pending) AS p;
    END IF;
    UPDATE live_jobs AS j
    SET cancel_requested = true
    WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL;
    v_claimed := ARRAY (
        SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL);
    PERFORM tell_workers(v_claimed);
    RETURN QUERY SELECT c, 'cancelling' FROM unnest(v_claimed) AS c;
END $$;

-- Reopens finished jobs under their own ids, with no attempts used.
CREATE FUNCTION retry_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    v_ids uuid[];
    v_lanes jsonb;
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT f.id, f.drop_on
        FROM finished_jobs AS f
        WHERE f.id = ANY (p_ids)
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
        RETURNING id, queue, job_type, run_at)
    SELECT array_agg(i.id),
           jsonb_agg(DISTINCT jsonb_build_array(i.queue, i.job_type, extract(epoch FROM i.run_at)))
    INTO v_ids, v_lanes
    FROM inserted AS i;
    PERFORM wake_workers(v_lanes);
    RETURN QUERY SELECT i FROM unnest(v_ids) AS i;
END $$;

-- How many jobs wait: due, scheduled and blocked ones. NULL means any.
CREATE FUNCTION pending_count(p_queue text DEFAULT NULL, p_job_type text DEFAULT NULL) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT count(*)
    FROM live_jobs AS j
    WHERE j.status = 'pending'
      AND (p_queue IS NULL OR j.queue = p_queue)
      AND (p_job_type IS NULL OR j.job_type = p_job_type)
$$;

-- Removes finished jobs, and their events, that finished longer ago than p_older_than.
CREATE FUNCTION clear_finished(
    p_older_than interval DEFAULT '0',
    p_statuses text[] DEFAULT '{completed,failed,cancelled}')
RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    WITH gone AS (
        DELETE FROM finished_jobs AS f
        WHERE f.completed_at <= clock_timestamp() - p_older_than AND f.status = ANY (p_statuses)
        RETURNING f.id, f.events_count),
    silent AS (
        DELETE FROM job_events AS e
        USING gone AS g
        WHERE e.job_id = g.id AND g.events_count > 0)
    SELECT count(*) FROM gone
$$;
