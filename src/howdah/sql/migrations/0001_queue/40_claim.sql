-- Claiming: peek into every lane once, then take from those with a due job, best lane first.
-- Filtering by type after the sort would make a backlog of one type cost every other type.
-- The planner is pinned: once plans are generic or statistics stale, it would rather hash or sort
-- the whole table. And it is asked once: a plan for every claim would take longer than most claims do.

CREATE FUNCTION claim_job_batch(
    p_worker_id text,
    p_job_types text[] DEFAULT NULL,
    p_batch_size int DEFAULT 10,
    p_lease interval DEFAULT '30 seconds',
    p_queues text[] DEFAULT '{default}',
    p_started boolean DEFAULT false)
RETURNS SETOF jobs
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lease_id uuid := gen_random_uuid();
    v_left int := p_batch_size;
    v_taken int;
    v_lane record;
BEGIN
    PERFORM check_claim(p_worker_id, p_batch_size, p_lease);
    FOR v_lane IN
        SELECT l.queue, l.job_type, l.priority
        FROM lanes AS l
        CROSS JOIN LATERAL (
            SELECT j.run_at
            FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
              AND j.run_at <= v_now
            ORDER BY j.run_at, j.id
            LIMIT 1) AS first
        WHERE l.queue = ANY (p_queues)
          AND (p_job_types IS NULL OR l.job_type = ANY (p_job_types))
        ORDER BY l.priority DESC, first.run_at
    LOOP
        RETURN QUERY
        WITH taken AS (
            UPDATE live_jobs AS j
            SET status = 'claimed',
                worker_id = left(p_worker_id, 100),
                lease_id = v_lease_id,
                lease_expires_at = v_now + p_lease,
                claims = j.claims + 1,
                attempts = j.attempts + 1,
                claimed_at = v_now,
                started_at = CASE WHEN p_started THEN v_now END,
                progress = 0,
                current_stage = NULL
            WHERE j.id = ANY (ARRAY (
                SELECT p.id
                FROM live_jobs AS p
                WHERE p.status = 'pending' AND p.blockers = 0
                  AND p.queue = v_lane.queue AND p.job_type = v_lane.job_type
                  AND p.priority = v_lane.priority
                  AND p.run_at <= v_now
                  AND p.attempts < p.max_attempts
                ORDER BY p.run_at, p.id
                LIMIT v_left
                FOR UPDATE SKIP LOCKED))
            RETURNING j.*)
        SELECT t.id, t.seq, t.queue::text, t.job_type::text, t.priority::int,
               CASE WHEN p_started THEN 'running' ELSE t.status END,
               t.data::jsonb, t.progress, t.current_stage, t.events_count,
               t.worker_id, t.lease_id, t.lease_expires_at, t.claims, t.claimed_at,
               t.run_at::timestamptz, t.created_at, t.started_at, NULL::timestamptz,
               t.attempts, t.max_attempts::int, t.last_error, t.request_id::text, t.traceparent::text,
               t.idempotency_key::text, t.ordering_key::text, t.holds_key, t.blockers, t.cancel_requested,
               t.keep::interval, NULL::jsonb
        FROM taken AS t
        ORDER BY t.run_at, t.id;
        GET DIAGNOSTICS v_taken = ROW_COUNT;
        v_left := v_left - v_taken;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;

-- Refuses a claim that makes no sense. Gives the size of the batch, so that it can stand in an expression.
CREATE FUNCTION check_claim(p_worker_id text, p_batch_size int, p_lease interval) RETURNS int
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT
AS $$
BEGIN
    IF coalesce(p_worker_id, '') = '' THEN
        RAISE EXCEPTION 'p_worker_id is empty: name the worker that claims'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_batch_size IS NULL OR p_batch_size NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'p_batch_size is %: it must be between 1 and 10000', p_batch_size
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_lease IS NULL OR p_lease <= interval '0' OR p_lease > interval '30 days' THEN
        RAISE EXCEPTION 'p_lease is %: it must be positive and at most 30 days', p_lease
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN p_batch_size;
END $$;

-- When the first job of these lanes that comes due after p_after will be: no worker sleeps past it.
-- By default also one that came due within the last 100 ms, since the claim that did not find it.
CREATE FUNCTION next_due_at(
    p_job_types text[] DEFAULT NULL,
    p_queues text[] DEFAULT '{default}',
    p_after timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN (
    SELECT min(first.run_at)
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT j.run_at
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
          AND j.run_at > coalesce(p_after, statement_timestamp() - interval '100 milliseconds')
        ORDER BY j.run_at, j.id
        LIMIT 1) AS first
    WHERE l.queue = ANY (p_queues)
      AND (p_job_types IS NULL OR l.job_type = ANY (p_job_types)));
END $$;
