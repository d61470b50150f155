-- The sweep: the one place that lowers heads, and the net under everything that is only likely.

-- Every lane that has a pending job, by skipping through the index from lane to lane.
CREATE FUNCTION pending_lanes() RETURNS TABLE (queue text, job_type text, priority int)
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

-- Adds missing lanes, lowers a head that hides a job, pulls back one that lies in the future, and
-- moves up one that a claim takes over 0.1 ms to walk from: small lanes rarely draw the lot, and a
-- claim walks in every lane.
CREATE FUNCTION sweep() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_lane record;
    v_began timestamptz;
    v_walked interval;
    v_seen timestamptz;
    v_hidden timestamptz;
BEGIN
    -- Where a lane cannot be had because an open transaction is adding it, its twin can: the jobs of
    -- others must not wait for that transaction.
    PERFORM add_lane(p.queue, p.job_type, p.priority, t.twin)
    FROM pending_lanes() AS p, (VALUES (false), (true)) AS t (twin);
    FOR v_lane IN SELECT l.queue, l.job_type, l.priority, l.head_at FROM lanes AS l LOOP
        v_began := clock_timestamp();
        SELECT j.run_at INTO v_seen
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = v_lane.queue AND j.job_type = v_lane.job_type AND j.priority = v_lane.priority
          AND j.run_at >= v_lane.head_at
        ORDER BY j.run_at, j.id
        LIMIT 1;
        v_walked := clock_timestamp() - v_began;
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
        ELSIF v_walked > interval '100 microseconds' OR v_lane.head_at > v_began THEN
            PERFORM move_head(v_lane.queue, v_lane.job_type, v_lane.priority, v_lane.head_at,
                              least(coalesce(v_seen, v_began), v_began - head_margin()));
        END IF;
    END LOOP;
    PERFORM recover_stale_jobs();
END $$;

-- Recovery by tick starts where the last one ended: leases are set to run out in the future, so what
-- expired before then is dealt with. Leases that were committed only after they ran out, and rows
-- that were locked, are left to the sweep, which looks at everything.
CREATE FUNCTION recover_expired(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_stale uuid[];
BEGIN
    v_stale := lock_stale(
        NULL, p_limit, (SELECT m.reached FROM maintenance AS m WHERE m.duty = 'recover'), v_began);
    IF v_stale <> '{}' THEN
        PERFORM return_jobs(v_stale, 'recover', 'the lease ran out; the worker stopped or was cut off');
    END IF;
    IF cardinality(v_stale) < p_limit THEN
        UPDATE maintenance SET reached = v_began - head_margin() WHERE duty = 'recover';
    END IF;
    RETURN cardinality(v_stale);
END $$;

CREATE OR REPLACE FUNCTION run_duty(p_duty text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    CASE p_duty
        WHEN 'recover' THEN PERFORM recover_expired();
        WHEN 'settle' THEN PERFORM settle_keys();
        WHEN 'sweep' THEN PERFORM sweep();
        WHEN 'prune' THEN PERFORM prune();
        WHEN 'leaves' THEN PERFORM tend_leaves();
    END CASE;
END $$;

INSERT INTO maintenance (duty, rank, period, spacing) VALUES ('sweep', 30, '5 seconds', 20);
