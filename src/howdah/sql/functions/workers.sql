-- Workers: registration, heartbeat and throughput.
--
-- Owns the tables workers and throughput.

-- Registers a worker as idle, and adds the lanes of its tasks, so that no enqueue has to.
CREATE OR REPLACE FUNCTION register_worker(
    p_worker_id text,
    p_host text,
    p_pid int,
    p_queues text[],
    p_job_types text[],
    p_priorities int[] DEFAULT '{100}',
    p_info jsonb DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO workers AS w (worker_id, host, pid, queues, job_types, idle, info)
    VALUES (left(p_worker_id, 100), p_host, p_pid, p_queues, p_job_types, true, p_info)
    ON CONFLICT (worker_id) DO UPDATE
    SET host = excluded.host, pid = excluded.pid, queues = excluded.queues,
        job_types = excluded.job_types, info = excluded.info, idle = true,
        started_at = clock_timestamp(), seen_at = clock_timestamp();
    PERFORM add_lane(q.queue, t.job_type, p.priority)
    FROM unnest(p_queues) AS q (queue), unnest(p_job_types) AS t (job_type),
         unnest(p_priorities) AS p (priority);
END $$;

-- Records that a worker is alive. p_idle NULL leaves the flag unchanged.
CREATE OR REPLACE FUNCTION touch_worker(
    p_worker_id text, p_idle boolean DEFAULT NULL, p_info jsonb DEFAULT NULL)
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    UPDATE workers
    SET seen_at = clock_timestamp(), idle = coalesce(p_idle, idle), info = coalesce(p_info, info)
    WHERE worker_id = left(p_worker_id, 100)
$$;

CREATE OR REPLACE FUNCTION remove_worker(p_worker_id text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$ DELETE FROM workers WHERE worker_id = left(p_worker_id, 100) $$;

-- Adds a worker's counts to its row of the current ten seconds. Each row has one writer, so no transaction
-- waits for another, and no reader has to count finished jobs (decision 0012).
CREATE OR REPLACE FUNCTION add_throughput(p_worker_id text, p_counts jsonb) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    INSERT INTO throughput AS t (
        bucket, worker_id, queue, job_type,
        completed, failed, retried, cancelled, wait_seconds, run_seconds)
    SELECT date_bin('10 seconds', clock_timestamp(), timestamptz '2000-01-01'), left(p_worker_id, 100),
           c.queue, c.job_type, c.completed, c.failed, c.retried, c.cancelled, c.wait_seconds, c.run_seconds
    FROM jsonb_to_recordset(p_counts) AS c (
        queue text, job_type text, completed int, failed int, retried int, cancelled int,
        wait_seconds float8, run_seconds float8)
    ON CONFLICT (bucket, queue, job_type, worker_id) DO UPDATE
    SET completed = t.completed + excluded.completed,
        failed = t.failed + excluded.failed,
        retried = t.retried + excluded.retried,
        cancelled = t.cancelled + excluded.cancelled,
        wait_seconds = t.wait_seconds + excluded.wait_seconds,
        run_seconds = t.run_seconds + excluded.run_seconds
$$;

-- A worker's heartbeat: its state, and its counts since the last heartbeat.
CREATE OR REPLACE FUNCTION beat_worker(p_worker_id text, p_info jsonb, p_counts jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM touch_worker(p_worker_id, NULL, p_info);
    IF p_counts IS NOT NULL THEN
        PERFORM add_throughput(p_worker_id, p_counts);
    END IF;
END $$;
