-- Lanes and their heads: a lane is one (queue, job type, priority); a claim searches the index lane by
-- lane.
--
-- Owns the table lanes. While a transaction elsewhere stays open, claimed jobs leave index entries that
-- vacuum cannot remove, and every claim would scan all of them. So each lane has head_at, a lower bound for
-- the due time of its first pending job, and a claim starts there. This keeps a claim's cost independent of
-- dead entries (P10).
--
-- A claim raises a head. Only sweep_lanes lowers one, and repairs what the other writers may miss.

-- Adds a lane unless another transaction is adding it now: its commit, or sweep_lanes, makes the lane
-- visible.
CREATE OR REPLACE FUNCTION add_lane(
    p_queue text, p_job_type text, p_priority int, p_twin boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT EXISTS (
           SELECT FROM lanes AS l
           WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority)
       AND pg_try_advisory_xact_lock(hashtextextended(
           concat_ws(':', current_schema(), 'lane', p_twin, p_priority, p_queue, p_job_type), 0))
    THEN
        INSERT INTO lanes (queue, job_type, priority, twin)
        VALUES (p_queue, p_job_type, p_priority, p_twin)
        ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- How far a head stays behind the clock, for enqueues that have not committed: their jobs are due no
-- earlier than the enqueue started. A notification carries the due time of a job whose enqueue takes
-- longer, and sweep_lanes finds the job in any case (decision 0017).
CREATE OR REPLACE FUNCTION head_margin() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN interval '1 second';

-- Compare and set, without waiting: a head that another transaction moved meanwhile is more recent.
CREATE OR REPLACE FUNCTION move_head(
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

-- The due time of a job that becomes pending again: where a claim will look, so neither below the head nor
-- in the future. (If every requeue lowered the head instead, updates of the lane would be lost, and
-- claims would scan dead entries again.)
CREATE OR REPLACE FUNCTION requeue_at(
    p_queue text, p_job_type text, p_priority int, p_run_at timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT greatest(p_run_at, (
        SELECT least(min(l.head_at), clock_timestamp())
        FROM lanes AS l
        WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
        HAVING count(*) > 0))
$$;

-- Every lane that has a pending job, by skipping from lane to lane through the index.
CREATE OR REPLACE FUNCTION pending_lanes() RETURNS TABLE (queue text, job_type text, priority int)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue text := '';
    v_job_type text := '';
    v_priority int;
BEGIN
    LOOP
        SELECT j.queue, j.job_type, j.priority INTO v_queue, v_job_type, v_priority
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND (j.queue, j.job_type) > (v_queue, v_job_type)
        ORDER BY j.queue, j.job_type, j.priority DESC
        LIMIT 1;
        EXIT WHEN NOT FOUND;
        WHILE v_priority IS NOT NULL LOOP
            RETURN QUERY SELECT v_queue, v_job_type, v_priority;
            SELECT j.priority INTO v_priority
            FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = v_queue AND j.job_type = v_job_type AND j.priority < v_priority
            ORDER BY j.priority DESC
            LIMIT 1;
        END LOOP;
    END LOOP;
END $$;

-- The duty `sweep`: adds missing lanes, lowers a head that hides a job, moves back a head that lies in the
-- future, and raises a head from which a scan takes more than 0.1 ms: a claim of few jobs rarely raises its
-- head, and every claim scans every lane. Then recovers stale jobs that recover_expired missed.
CREATE OR REPLACE FUNCTION sweep_lanes() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_lane record;
    v_began timestamptz;
    v_scan_time interval;
    v_first timestamptz;
    v_hidden timestamptz;
BEGIN
    -- If an open transaction is adding a lane, its row cannot be added here, but its twin can: jobs of other
    -- transactions must not wait for that one.
    PERFORM add_lane(p.queue, p.job_type, p.priority, t.twin)
    FROM pending_lanes() AS p, (VALUES (false), (true)) AS t (twin);
    FOR v_lane IN SELECT l.queue, l.job_type, l.priority, l.head_at FROM lanes AS l LOOP
        v_began := clock_timestamp();
        SELECT j.run_at INTO v_first
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = v_lane.queue AND j.job_type = v_lane.job_type AND j.priority = v_lane.priority
          AND j.run_at >= v_lane.head_at
        ORDER BY j.run_at, j.id
        LIMIT 1;
        v_scan_time := clock_timestamp() - v_began;
        SELECT j.run_at INTO v_hidden
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = v_lane.queue AND j.job_type = v_lane.job_type AND j.priority = v_lane.priority
          AND j.run_at < v_lane.head_at
        ORDER BY j.run_at, j.id
        LIMIT 1;
        IF v_hidden IS NOT NULL THEN
            PERFORM move_head(v_lane.queue, v_lane.job_type, v_lane.priority, v_lane.head_at, v_hidden);
            PERFORM wake_workers(jsonb_build_array(jsonb_build_array(
                v_lane.queue, v_lane.job_type, extract(epoch FROM v_hidden))));
        ELSIF v_scan_time > interval '100 microseconds' OR v_lane.head_at > v_began THEN
            PERFORM move_head(v_lane.queue, v_lane.job_type, v_lane.priority, v_lane.head_at,
                              least(coalesce(v_first, v_began), v_began - head_margin()));
        END IF;
    END LOOP;
    PERFORM recover_stale_jobs();
END $$;
