-- Notifications: wake idle workers, tell workers of cancellations and watchers of changes.
--
-- Owns the table watchers and the channels SCHEMA:wake:HASH, SCHEMA:cancel and SCHEMA:job. NOTIFY serializes
-- commits, so every notification has a condition. None is needed for correctness: listeners also poll.

-- The channel on which a worker is woken. One channel per worker: a notification reaches one client, and the
-- others of a fleet go on sleeping (decision 0039).
CREATE OR REPLACE FUNCTION wake_channel(p_worker_id text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT current_schema() || ':wake:'
        || left(encode(sha256(convert_to(left(p_worker_id, 100), 'UTF8')), 'hex'), 8)
$$;

-- Up to p_count idle workers that run this type of job from this queue (NULL: any) and have a free slot for it,
-- from a random one on: the scan reads about as many rows as it returns. A killed worker cannot clear its idle flag: the flag is ignored
-- after a minute, and if its last heartbeat was written by a clock that was more than a minute ahead.
CREATE OR REPLACE FUNCTION idle_workers(
    p_queue text, p_job_type text, p_count bigint, p_except text DEFAULT NULL)
RETURNS SETOF text
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_seen timestamptz := clock_timestamp() - interval '1 minute';
    v_ahead timestamptz := v_seen + interval '2 minutes';
    v_start bigint := ((random() - 0.5) * 18446744073709500000)::bigint;
    v_found bigint;
BEGIN
    RETURN QUERY
    SELECT w.worker_id::text
    FROM workers AS w
    WHERE w.idle AND hashtextextended(w.worker_id, 0) >= v_start
      AND w.seen_at BETWEEN v_seen AND v_ahead AND w.worker_id IS DISTINCT FROM p_except
      AND (p_queue IS NULL OR p_queue = ANY (w.queues))
      AND (p_job_type IS NULL OR p_job_type = ANY (w.job_types) AND p_job_type <> ALL (w.full_types))
    ORDER BY hashtextextended(w.worker_id, 0)
    LIMIT p_count;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found < p_count THEN
        RETURN QUERY
        SELECT w.worker_id::text
        FROM workers AS w
        WHERE w.idle AND hashtextextended(w.worker_id, 0) < v_start
          AND w.seen_at BETWEEN v_seen AND v_ahead AND w.worker_id IS DISTINCT FROM p_except
          AND (p_queue IS NULL OR p_queue = ANY (w.queues))
          AND (p_job_type IS NULL OR p_job_type = ANY (w.job_types) AND p_job_type <> ALL (w.full_types))
        ORDER BY hashtextextended(w.worker_id, 0)
        LIMIT p_count - v_found;
    END IF;
END $$;

-- Wakes as many idle workers as there are jobs, once per statement. p_lanes is [[queue, job type, least due
-- time, priority, jobs], ...]; an element without a number of jobs stands for one. Jobs that are due later
-- wake one worker, which waits for them. The workers are chosen and not marked: a mark would be a lock on
-- their rows until the caller's transaction ends.
CREATE OR REPLACE FUNCTION wake_workers(p_lanes jsonb, p_except text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_now float8 := extract(epoch FROM clock_timestamp());
    v_payload text;
    v_workers text[];
BEGIN
    IF p_lanes IS NULL OR NOT EXISTS (
        SELECT FROM workers
        WHERE idle AND seen_at BETWEEN clock_timestamp() - interval '1 minute'
                                   AND clock_timestamp() + interval '1 minute')
    THEN
        RETURN;
    END IF;
    IF p_lanes -> 1 IS NULL THEN
        v_payload := p_lanes::text;
        v_workers := ARRAY (SELECT idle_workers(
            p_lanes #>> '{0,0}', p_lanes #>> '{0,1}',
            CASE WHEN (p_lanes #>> '{0,2}')::float8 > v_now THEN 1
                 ELSE coalesce((p_lanes #>> '{0,4}')::bigint, 1) END,
            p_except));
    ELSE
        WITH lanes AS MATERIALIZED (
            SELECT l ->> 0 AS queue, l ->> 1 AS job_type, min((l ->> 2)::float8) AS due,
                   sum(CASE WHEN (l ->> 2)::float8 > v_now THEN 0
                            ELSE coalesce((l ->> 4)::bigint, 1) END)::bigint AS jobs
            FROM jsonb_array_elements(p_lanes) AS l
            GROUP BY 1, 2),
        total AS MATERIALIZED (
            SELECT count(*) AS lanes, sum(greatest(l.jobs, 1))::bigint AS jobs FROM lanes AS l)
        SELECT CASE WHEN t.lanes <= 100
                    THEN (SELECT jsonb_agg(jsonb_build_array(l.queue, l.job_type, l.due)) FROM lanes AS l)::text
               END,
               CASE WHEN t.lanes <= 100
                    THEN ARRAY (SELECT DISTINCT w
                                FROM lanes AS l, idle_workers(l.queue, l.job_type, greatest(l.jobs, 1), p_except) AS w)
                    -- One search for all of thousands of lanes.
                    ELSE ARRAY (SELECT w.worker_id::text
                                FROM workers AS w
                                WHERE w.worker_id IN (SELECT idle_workers(NULL, NULL, t.jobs, p_except))
                                  AND EXISTS (
                                      SELECT FROM lanes AS l
                                      WHERE l.queue = ANY (w.queues) AND l.job_type = ANY (w.job_types)
                                        AND l.job_type <> ALL (w.full_types)))
               END
        INTO v_payload, v_workers
        FROM total AS t;
    END IF;
    PERFORM pg_notify(wake_channel(w),
                      CASE WHEN octet_length(v_payload) < 7000 THEN v_payload ELSE '[]' END)
    FROM unnest(v_workers) AS w;
END $$;

-- For a worker that was woken and has no free slot for what it found: wakes as many others as jobs are due, up
-- to ten per lane. Those do the same in turn.
CREATE OR REPLACE FUNCTION pass_wake(
    p_worker_id text,
    p_job_types text[] DEFAULT NULL,
    p_queues text[] DEFAULT '{default}',
    p_due_from timestamptz DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan SET jit = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_types jsonb := CASE WHEN cardinality(p_job_types) > 20 THEN hash_types(p_job_types) END;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    IF NOT EXISTS (SELECT idle_workers(NULL, NULL, 1, left(p_worker_id, 100))) THEN
        RETURN;
    END IF;
    PERFORM wake_workers(
        (SELECT jsonb_agg(jsonb_build_array(
                    l.queue, l.job_type, extract(epoch FROM due.first), l.priority, due.jobs))
         FROM lanes AS l
         CROSS JOIN LATERAL lane_head(l.number) AS h
         CROSS JOIN LATERAL (
             SELECT min(j.run_at) AS first, count(*) AS jobs
             FROM (SELECT j.run_at
                   FROM live_jobs AS j
                   WHERE j.status = 'pending' AND j.blockers = 0
                     AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
                     AND j.run_at >= CASE WHEN h.head_at > v_now THEN '-infinity'
                                          ELSE least(h.head_at, p_due_from) END
                     AND j.run_at <= v_now
                   ORDER BY j.run_at, j.id
                   LIMIT 10) AS j) AS due
         WHERE l.queue = ANY (p_queues)
           AND (p_job_types IS NULL
                OR CASE WHEN v_types IS NULL THEN l.job_type = ANY (p_job_types) ELSE v_types ? l.job_type END)
           AND due.jobs > 0),
        left(p_worker_id, 100));
END $$;

-- What an idle worker waits for: when the next job of its lanes is due, if in less than five seconds, and how many
-- idle workers come before it in the order in which they answer. Without an order, all workers of a fleet would claim at
-- that time.
-- p_overdue is for a poll: it includes jobs that are due already, so that a worker claims only if there is one.
CREATE OR REPLACE FUNCTION next_wake(
    p_worker_id text,
    p_job_types text[] DEFAULT NULL,
    p_queues text[] DEFAULT '{default}',
    p_overdue boolean DEFAULT false)
RETURNS TABLE (due_at timestamptz, rank bigint, now timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue text;
    v_job_type text;
    v_types jsonb := CASE WHEN cardinality(p_job_types) > 20 THEN hash_types(p_job_types) END;
BEGIN
    -- Jobs that became due in the last 100 ms are included: the claim before may have missed them.
    SELECT l.queue, l.job_type, first.run_at INTO v_queue, v_job_type, due_at
    FROM lanes AS l
    CROSS JOIN LATERAL lane_head(l.number) AS h
    CROSS JOIN LATERAL (
        SELECT j.run_at
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
          AND j.run_at > CASE WHEN p_overdue AND h.head_at > statement_timestamp() THEN '-infinity'
                              WHEN p_overdue THEN h.head_at - interval '1 microsecond'
                              ELSE statement_timestamp() - interval '100 milliseconds' END
          -- A worker polls again before then. Jobs that were cancelled before they were due leave dead entries.
          AND j.run_at < statement_timestamp() + interval '5 seconds'
        ORDER BY j.run_at, j.id
        LIMIT 1) AS first
    WHERE l.queue = ANY (p_queues)
      AND (p_job_types IS NULL
           OR CASE WHEN v_types IS NULL THEN l.job_type = ANY (p_job_types) ELSE v_types ? l.job_type END)
    ORDER BY first.run_at
    LIMIT 1;
    now := clock_timestamp();
    rank := 0;
    IF due_at IS NOT NULL THEN
        rank := (
            SELECT count(*)
            FROM workers AS w
            WHERE w.idle
              AND hashtextextended(w.worker_id, 0) < hashtextextended(left(p_worker_id, 100) COLLATE "C", 0)
              AND w.seen_at BETWEEN now - interval '1 minute' AND now + interval '1 minute'
              AND v_queue = ANY (w.queues) AND v_job_type = ANY (w.job_types)
              AND v_job_type <> ALL (w.full_types));
    END IF;
    RETURN NEXT;
END $$;

-- Notifies the watchers of these jobs of a change. The notification carries the id; watchers read the job. By id
-- alone: asking first whether there is any watcher would read the dead rows of all that have ended.
CREATE OR REPLACE FUNCTION notify_watchers(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM pg_notify(current_schema() || ':job', w.job_id::text)
    FROM watchers AS w
    WHERE w.job_id = ANY (p_ids);
END $$;

-- Notifies the workers that run these jobs to check their leases now: a job was cancelled or taken over.
CREATE OR REPLACE FUNCTION notify_cancellation(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_ids <> '{}' THEN
        PERFORM pg_notify(current_schema() || ':cancel',
                          CASE WHEN cardinality(p_ids) <= 150 THEN to_json(p_ids)::text ELSE '[]' END);
    END IF;
END $$;

-- Requests notifications on the channel SCHEMA:job of every change to these jobs for a while (decision
-- 0010).
CREATE OR REPLACE FUNCTION watch_jobs(p_watcher text, p_ids uuid[], p_for interval DEFAULT '1 minute')
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM validate_duration('p_for', p_for);
    INSERT INTO watchers (job_id, watcher, until)
    SELECT i, left(p_watcher, 200), clock_timestamp() + p_for
    FROM unnest(p_ids) AS i
    ORDER BY i
    ON CONFLICT (job_id, watcher) DO UPDATE SET until = excluded.until;
END $$;

CREATE OR REPLACE FUNCTION unwatch_jobs(p_watcher text, p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    DELETE FROM watchers WHERE watcher = left(p_watcher, 200) AND job_id = ANY (p_ids);
END $$;
