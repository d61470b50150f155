-- Lane heads. While a transaction elsewhere stays open, claimed jobs leave index entries that vacuum
-- cannot remove, and every claim would walk over all of them. So each lane keeps head_at, a lower
-- bound on the due time of its first pending job, and a claim starts there.

ALTER TABLE lanes ADD COLUMN head_at timestamptz NOT NULL DEFAULT '-infinity';
ALTER TABLE maintenance ADD COLUMN reached timestamptz NOT NULL DEFAULT '-infinity';

-- How far a head stays behind the clock, for enqueues that are under way: what they add is due when
-- they began at the earliest. One that takes longer is announced with its due time, and found by the
-- sweep in any case.
CREATE FUNCTION head_margin() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN interval '1 second';

-- Compare and set, without waiting: whoever moved the head meanwhile knew something newer.
CREATE FUNCTION move_head(
    p_queue text, p_job_type text, p_priority int, p_from timestamptz, p_to timestamptz)
RETURNS void
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
    UPDATE lanes
    SET head_at = p_to
    WHERE p_to <> p_from
      AND ctid = ANY (ARRAY (
          SELECT l.ctid
          FROM lanes AS l
          WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
            AND l.head_at = p_from
          FOR NO KEY UPDATE SKIP LOCKED))
$$;

-- What becomes pending again goes where a claim will look: not below the head, not into the future.
-- (Lowering the head instead, from everywhere, loses updates and undoes the gain.)
CREATE OR REPLACE FUNCTION due_again(p_queue text, p_job_type text, p_priority int, p_run_at timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT greatest(p_run_at, (
        SELECT least(min(l.head_at), clock_timestamp())
        FROM lanes AS l
        WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
        HAVING count(*) > 0))
$$;

-- Claiming, from the heads on. With a chance of one in a thousand per job taken it moves the head up
-- to what the peek saw (not to what it took: another claimer's jobs may come back). That needs no
-- state and writes few versions of the lane's row. p_ignore_heads is for a worker that was woken for
-- a job older than the margin.
DROP FUNCTION claim_job_batch;
CREATE FUNCTION claim_job_batch(
    p_worker_id text,
    p_job_types text[] DEFAULT NULL,
    p_batch_size int DEFAULT 10,
    p_lease interval DEFAULT '30 seconds',
    p_queues text[] DEFAULT '{default}',
    p_started boolean DEFAULT false,
    p_ignore_heads boolean DEFAULT false)
RETURNS SETOF jobs
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lease_id uuid := gen_random_uuid();
    v_left int := check_claim(p_worker_id, p_batch_size, p_lease);
    v_taken int;
    v_lane record;
    v_head timestamptz;
    v_types jsonb;
BEGIN
    IF cardinality(p_job_types) > 20 THEN
        -- An array is searched from its beginning, for every lane: of many types an object is made.
        v_types := (SELECT jsonb_object_agg(t, 1) FROM unnest(p_job_types) AS t);
    END IF;
    FOR v_lane IN
        SELECT l.queue, l.job_type, l.priority, l.head_at, first.run_at AS first_seen
        FROM lanes AS l
        CROSS JOIN LATERAL (
            SELECT j.run_at
            FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
              AND j.run_at >= CASE WHEN p_ignore_heads THEN '-infinity' ELSE l.head_at END
              AND j.run_at <= v_now
            ORDER BY j.run_at, j.id
            LIMIT 1) AS first
        WHERE l.queue = ANY (p_queues)
          AND (p_job_types IS NULL
               OR CASE WHEN v_types IS NULL THEN l.job_type = ANY (p_job_types)
                       ELSE v_types ? l.job_type END)
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
                  AND p.run_at >= v_lane.first_seen
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
        -- Up only: what became pending again lies on the head, not behind it.
        v_head := least(v_lane.first_seen, v_now - head_margin());
        IF random() * 1000 < v_taken AND v_head > v_lane.head_at THEN
            PERFORM move_head(v_lane.queue, v_lane.job_type, v_lane.priority, v_lane.head_at, v_head);
        END IF;
        v_left := v_left - v_taken;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;
