-- Lanes and their heads: a lane is one (queue, job type, priority); a claim searches the index lane by
-- lane.
--
-- Owns the table lanes. While a transaction elsewhere stays open, claimed jobs leave index entries that
-- vacuum cannot remove, and every claim would scan all of them. So each lane has head_at, a lower bound for
-- the due time of its first pending job, and a claim starts there. This keeps a claim's cost independent of
-- dead entries (P10).
--
-- A claim raises a head. Only sweep_lanes lowers one, and repairs what the other writers may miss
-- (decision 0031). It also removes lanes that are no longer used (decision 0032).

-- Adds a lane unless another transaction is adding it now: its commit, or sweep_lanes, makes the lane
-- visible. A row that sweep_lanes is about to remove does not count; the new row is then its twin. One lock for
-- every 32nd of all lanes, because the server's table of locks is small: a transaction may add any number of
-- lanes, and a lane whose lock another transaction holds is left to sweep_lanes (decision 0034).
CREATE OR REPLACE FUNCTION add_lane(
    p_queue text, p_job_type text, p_priority int, p_twin boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_twin boolean;
BEGIN
    IF EXISTS (
        SELECT FROM lanes AS l
        WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority AND l.closing = 0)
    THEN
        RETURN;
    END IF;
    v_twin := coalesce(
        (SELECT NOT l.twin
         FROM lanes AS l
         WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
         LIMIT 1),
        p_twin);
    IF pg_try_advisory_xact_lock(hashtextextended(
        concat_ws(':', current_schema(), 'lanes', v_twin, hashtextextended(
            concat_ws(':', p_priority, p_queue, p_job_type), 0) & 31), 0))
    THEN
        INSERT INTO lanes (queue, job_type, priority, twin)
        VALUES (p_queue, p_job_type, p_priority, v_twin)
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
-- claims would scan dead entries again.) A snapshot that is older than the statement may show an old head.
CREATE OR REPLACE FUNCTION requeue_at(
    p_queue text, p_job_type text, p_priority int, p_run_at timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT greatest(p_run_at, (
        SELECT CASE WHEN current_setting('transaction_isolation') = 'read committed'
                    THEN least(min(l.head_at), clock_timestamp())
                    ELSE clock_timestamp() END
        FROM lanes AS l
        WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
        HAVING count(*) > 0))
$$;

-- The duty `sweep`: adds missing lanes, lowers a head that hides a job, moves back a head that lies in the
-- future, raises a head from which a scan takes long, and removes unused lanes.
--
-- The order matters: first the heads, then which transactions are writing, then the jobs. A transaction
-- that starts to write after the second step reads these heads or higher ones; one that ended before it is
-- visible to the third step.
CREATE OR REPLACE FUNCTION sweep_lanes() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_lanes lanes[];
    v_lane lanes;
    v_writers record;
BEGIN
    IF pg_try_advisory_xact_lock(hashtextextended(current_schema() || ':sweep', 0)) THEN
        PERFORM add_missing_lanes();
        v_lanes := ARRAY (SELECT l FROM lanes AS l);
        v_writers := note_writers();
        FOREACH v_lane IN ARRAY v_lanes LOOP
            -- A claim scans every lane: together they should not take long.
            PERFORM sweep_lane(v_lane, v_writers.ended, v_writers.lasting,
                               interval '1 millisecond' / greatest(10, cardinality(v_lanes)));
        END LOOP;
    END IF;
END $$;

-- Adds the lanes of pending jobs that have none: a lane whose transaction was rolled back, or that was
-- removed while a transaction with an old snapshot used it. Searches only between the lanes that exist:
-- inside a lane, the search would read its dead entries. (Before PostgreSQL 18, a row comparison such as
-- (queue, job_type) < (x, y) does not end a scan: it would read the rest of the queue.)
CREATE OR REPLACE FUNCTION add_missing_lanes() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
DECLARE
    v_missing jsonb;
    v_previous jsonb;
BEGIN
    LOOP
        v_missing := (SELECT jsonb_agg(to_jsonb(m)) FROM missing_lanes() AS m);
        -- An open transaction is adding a lane that was found again.
        EXIT WHEN v_missing IS NULL OR v_missing = v_previous;
        -- If an open transaction is adding a lane, its row cannot be added here, but its twin can: jobs of
        -- other transactions must not wait for that one.
        PERFORM add_lane(m ->> 'queue', m ->> 'job_type', (m ->> 'priority')::int, t.twin)
        FROM jsonb_array_elements(v_missing) AS m, (VALUES (false), (true)) AS t (twin);
        v_previous := v_missing;
    END LOOP;
END $$;

-- The first pending job without a lane in each gap between queues, between the job types of a queue and
-- between the priorities of a job type.
CREATE OR REPLACE FUNCTION missing_lanes() RETURNS TABLE (queue text, job_type text, priority int)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
    WITH queues AS (
        SELECT q.queue, lead(q.queue) OVER (ORDER BY q.queue) AS until
        FROM (SELECT '' COLLATE "C" AS queue UNION SELECT l.queue FROM lanes AS l) AS q),
    types AS (
        SELECT t.queue, t.job_type,
               lead(t.job_type) OVER (PARTITION BY t.queue ORDER BY t.job_type) AS until
        FROM (SELECT l.queue, '' COLLATE "C" AS job_type FROM lanes AS l
              UNION SELECT l.queue, l.job_type FROM lanes AS l) AS t),
    priorities AS (
        SELECT p.queue, p.job_type, p.priority,
               lead(p.priority, 1, 1001) OVER (
                   PARTITION BY p.queue, p.job_type ORDER BY p.priority) AS until
        FROM (SELECT l.queue, l.job_type, -1001 AS priority FROM lanes AS l
              UNION SELECT l.queue, l.job_type, l.priority FROM lanes AS l) AS p)
    SELECT f.* FROM queues AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue > g.queue AND j.queue < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    UNION ALL
    SELECT f.* FROM queues AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue > g.queue
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    WHERE g.until IS NULL
    UNION ALL
    SELECT f.* FROM types AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = g.queue AND j.job_type > g.job_type AND j.job_type < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    UNION ALL
    SELECT f.* FROM types AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue = g.queue AND j.job_type > g.job_type
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    WHERE g.until IS NULL
    UNION ALL
    SELECT f.* FROM priorities AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue = g.queue AND j.job_type = g.job_type
          AND j.priority > g.priority AND j.priority < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
$$;

-- The other transactions that have written jobs and not ended. Their locks are released after their commit can be
-- seen, so the next statement sees what a transaction that is not among them has written.
CREATE OR REPLACE FUNCTION writers_of_jobs() RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN RETURN ARRAY (
    SELECT DISTINCT k.virtualtransaction
    FROM pg_locks AS k
    WHERE k.locktype = 'relation' AND k.relation = 'live_jobs'::regclass
      AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND k.mode = 'RowExclusiveLock' AND k.pid IS DISTINCT FROM pg_backend_pid());
END $$;

-- Notes which other transactions have written jobs and not ended. Returns whether one ended that an earlier
-- sweep had noted twice, and whether one is noted for the second time or more: a transaction that spans two
-- sweeps. NULL if the caller's snapshot is older than this statement.
CREATE OR REPLACE FUNCTION note_writers(OUT ended boolean, OUT lasting boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_open text[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    v_open := writers_of_jobs();
    ended := EXISTS (SELECT FROM open_writers AS w WHERE w.lasting AND w.writer <> ALL (v_open));
    lasting := EXISTS (SELECT FROM open_writers AS w WHERE w.writer = ANY (v_open));
    DELETE FROM open_writers AS w WHERE w.writer <> ALL (v_open);
    UPDATE open_writers AS w SET lasting = true WHERE NOT w.lasting;
    INSERT INTO open_writers (writer) SELECT unnest(v_open) ON CONFLICT DO NOTHING;
END $$;

-- Sweeps one lane, as it was before note_writers. A job below the head was written by a transaction that
-- read a lower head: no lower than the head of two sweeps ago, or, if the transaction spans more sweeps,
-- than that of the sweep before it started. So only what lies above is searched, not every dead entry.
-- After the server's clock was ahead, these times say nothing.
CREATE OR REPLACE FUNCTION sweep_lane(
    p_lane lanes, p_ended boolean, p_lasting boolean, p_scan_limit interval)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_swept lanes := p_lane;
    v_first timestamptz;
    v_hidden timestamptz;
    v_from timestamptz := CASE WHEN p_ended THEN p_lane.swept_lasting_at ELSE p_lane.swept_before_at END;
BEGIN
    SELECT j.run_at INTO v_first
    FROM live_jobs AS j
    WHERE j.status = 'pending' AND j.blockers = 0
      AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority
      AND j.run_at >= p_lane.head_at
    ORDER BY j.run_at, j.id
    LIMIT 1;
    IF clock_timestamp() - v_began > p_scan_limit THEN
        v_swept.head_at := greatest(
            p_lane.head_at, least(coalesce(v_first, v_began), v_began - head_margin()));
    END IF;
    IF p_ended IS NULL OR greatest(p_lane.head_at, p_lane.swept_at, p_lane.swept_before_at) > v_began THEN
        v_from := '-infinity';
        v_swept.head_at := least(v_swept.head_at, v_began - head_margin());
    END IF;
    IF v_from < p_lane.head_at THEN
        SELECT j.run_at INTO v_hidden
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority
          AND j.run_at >= v_from AND j.run_at < p_lane.head_at
        ORDER BY j.run_at, j.id
        LIMIT 1;
        IF v_hidden < v_swept.head_at THEN
            v_swept.head_at := v_hidden;
            PERFORM wake_workers(jsonb_build_array(jsonb_build_array(
                p_lane.queue, p_lane.job_type, extract(epoch FROM v_hidden))));
        END IF;
    END IF;
    IF p_lasting IS NOT NULL THEN
        v_swept.swept_at := least(p_lane.head_at, v_swept.head_at);
        v_swept.swept_before_at := least(p_lane.swept_at, v_swept.swept_at);
        v_swept.swept_lasting_at := least(
            CASE WHEN p_lasting THEN p_lane.swept_lasting_at END, v_swept.swept_before_at);
        IF p_lane.closing > 0 OR p_lane.empty_at IS NULL AND v_first IS NULL
           OR p_lane.empty_at NOT BETWEEN v_began - interval '10 minutes' AND v_began
        THEN
            v_swept := close_lane(v_swept, coalesce(v_first, v_hidden) IS NULL, p_lasting);
        END IF;
    END IF;
    IF v_swept IS DISTINCT FROM p_lane THEN
        PERFORM store_sweep(p_lane, v_swept);
    END IF;
END $$;

-- Decides on the removal of an unused lane, in steps (decision 0032). A lane that is empty now and was empty
-- ten minutes ago closes: enqueues that see this add a new row. Those that do not see it have started to
-- write before the next sweep. When no transaction spans the two sweeps after that one, their jobs are
-- visible: the row is removed, or opened again if it has a job.
CREATE OR REPLACE FUNCTION close_lane(p_lane lanes, p_empty boolean, p_lasting boolean) RETURNS lanes
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_lane lanes := p_lane;
    v_unused boolean;
BEGIN
    IF p_lane.closing = 1 THEN
        v_lane.closing := 2;
    ELSIF p_lane.closing = 2 AND NOT p_lasting THEN
        v_unused := NOT has_claimed_job(p_lane) AND NOT EXISTS (
            SELECT FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority);
        -- Dead entries of a lane are skipped only while the lane exists.
        v_lane.closing := CASE WHEN v_unused AND clock_timestamp() - v_began < interval '5 milliseconds'
                               THEN 3 ELSE 0 END;
        v_lane.empty_at := v_began;
    ELSIF p_lane.closing = 0 AND p_empty AND p_lane.empty_at IS NULL THEN
        v_lane.empty_at := v_began;
    ELSIF p_lane.closing = 0 AND p_lane.empty_at NOT BETWEEN v_began - interval '10 minutes' AND v_began THEN
        v_unused := p_empty AND NOT has_claimed_job(p_lane) AND NOT EXISTS (
            SELECT FROM lanes AS l
            WHERE l.queue = p_lane.queue AND l.job_type = p_lane.job_type
              AND l.priority = p_lane.priority AND l.closing > 0);
        v_lane.closing := v_unused::int;
        v_lane.empty_at := NULL;
    END IF;
    RETURN v_lane;
END $$;

-- Whether a job of this lane is being run, and may return to it. A lease that ended a minute ago is that of
-- a recovered job, or soon will be.
CREATE OR REPLACE FUNCTION has_claimed_job(p_lane lanes) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_from timestamptz := clock_timestamp() - interval '1 minute';
BEGIN
    RETURN EXISTS (
        SELECT FROM live_jobs AS j
        WHERE j.status = 'claimed' AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type
          AND j.lease_expires_at >= v_from AND j.priority = p_lane.priority);
END $$;

-- Stores what a sweep found out about a lane, without waiting. A head that a claim moved meanwhile is more
-- recent.
CREATE OR REPLACE FUNCTION store_sweep(p_lane lanes, p_swept lanes) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_row tid;
BEGIN
    SELECT l.ctid INTO v_row
    FROM lanes AS l
    WHERE l.queue = p_lane.queue AND l.job_type = p_lane.job_type AND l.priority = p_lane.priority
      AND l.twin = p_lane.twin
    FOR UPDATE SKIP LOCKED;
    IF p_swept.closing = 3 THEN
        DELETE FROM lanes AS l WHERE l.ctid = v_row;
    ELSE
        UPDATE lanes AS l
        SET head_at = CASE WHEN l.head_at = p_lane.head_at THEN p_swept.head_at ELSE l.head_at END,
            swept_at = p_swept.swept_at,
            swept_before_at = p_swept.swept_before_at,
            swept_lasting_at = p_swept.swept_lasting_at,
            empty_at = p_swept.empty_at,
            closing = p_swept.closing
        WHERE l.ctid = v_row;
    END IF;
END $$;
