-- What operators do to jobs: cancel, retry, take over, count and remove them.

-- Cancels jobs. A pending job ends as cancelled. For a claimed job cancellation is requested; the worker
-- sees it with its next heartbeat. The rows are locked first and then handled by their status: one
-- statement that removes pending rows and marks claimed rows would miss a row that is being claimed.
CREATE OR REPLACE FUNCTION cancel_jobs(p_ids uuid[]) RETURNS TABLE (id uuid, status text)
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
            NULL;  -- an acknowledgement holds some rows and waits for ours: release ours, retry
        END;
    END LOOP;
    SELECT array_agg(j.id), array_agg(DISTINCT j.ordering_key) FILTER (WHERE NOT j.holds_key)
    INTO v_pending, v_waiting
    FROM live_jobs AS j
    WHERE j.id = ANY (p_ids) AND j.status = 'pending';
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
    WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL;
    v_claimed := ARRAY (
        SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids) AND j.lease_id IS NOT NULL);
    PERFORM notify_cancellation(v_claimed);
    RETURN QUERY SELECT c, 'cancelling' FROM unnest(v_claimed) AS c;
END $$;

-- Makes finished jobs pending again under their own ids, with no attempts used.
CREATE OR REPLACE FUNCTION retry_jobs(p_ids uuid[]) RETURNS SETOF uuid
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

-- Takes claimed jobs away from their workers, which are notified, and requeues them. The interrupted
-- attempt does not count.
CREATE OR REPLACE FUNCTION takeover_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '5s'
AS $$
DECLARE
    v_ids uuid[];
BEGIN
    v_ids := ARRAY (
        SELECT j.id FROM live_jobs AS j
        WHERE j.id = ANY (p_ids) AND j.status = 'claimed'
        ORDER BY j.id
        FOR UPDATE);
    PERFORM requeue_jobs(v_ids, 'release');
    PERFORM notify_cancellation(v_ids);
    RETURN QUERY SELECT i FROM unnest(v_ids) AS i;
END $$;

-- The number of pending jobs: due, scheduled and blocked. NULL means any.
CREATE OR REPLACE FUNCTION pending_count(p_queue text DEFAULT NULL, p_job_type text DEFAULT NULL)
RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT count(*)
    FROM live_jobs AS j
    WHERE j.status = 'pending'
      AND (p_queue IS NULL OR j.queue = p_queue)
      AND (p_job_type IS NULL OR j.job_type = p_job_type)
$$;

-- Removes finished jobs, and their events, that finished longer ago than p_older_than.
CREATE OR REPLACE FUNCTION clear_finished(
    p_older_than interval DEFAULT '0',
    p_statuses text[] DEFAULT '{completed,failed,cancelled}')
RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    WITH cleared AS (
        DELETE FROM finished_jobs AS f
        WHERE f.completed_at <= clock_timestamp() - p_older_than AND f.status = ANY (p_statuses)
        RETURNING f.id, f.events_count),
    cleared_events AS (
        DELETE FROM job_events AS e
        USING cleared AS c
        WHERE e.job_id = c.id AND c.events_count > 0)
    SELECT count(*) FROM cleared
$$;

-- Removes finished jobs, and their events, by id. Live jobs are not removed: cancel them first.
CREATE OR REPLACE FUNCTION remove_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
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
    SELECT r.id FROM removed AS r
$$;
