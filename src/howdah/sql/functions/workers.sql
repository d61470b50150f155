-- Workers: registration, heartbeat and throughput.
--
-- Owns the tables workers and throughput. A row belongs to one life of a worker: p_life is drawn when the
-- worker starts, and the functions change no row of another life (decision 0037).

-- Registers a worker, and adds the lanes of its tasks, so that no enqueue has to. Calling it again replaces
-- the row of this life.
CREATE OR REPLACE FUNCTION register_worker(
    p_worker_id text,
    p_host text,
    p_pid int,
    p_queues text[],
    p_job_types text[],
    p_priorities int[] DEFAULT '{100}',
    p_info jsonb DEFAULT '{}',
    p_life uuid DEFAULT '00000000-0000-0000-0000-000000000000',
    p_idle boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    INSERT INTO workers AS w (worker_id, life, host, pid, queues, job_types, idle, info)
    VALUES (left(p_worker_id, 100), p_life, p_host, p_pid, p_queues, p_job_types, p_idle, p_info)
    ON CONFLICT (worker_id, life) DO UPDATE
    SET host = excluded.host, pid = excluded.pid, queues = excluded.queues,
        job_types = excluded.job_types, info = excluded.info, idle = excluded.idle, full_types = '{}',
        started_at = clock_timestamp(), seen_at = clock_timestamp();
    PERFORM add_lane(q.queue, t.job_type, p.priority)
    FROM unnest(p_queues) AS q (queue), unnest(p_job_types) AS t (job_type),
         unnest(p_priorities) AS p (priority);
END $$;

-- Records that a worker is alive, and returns whether it is registered. NULL leaves a value unchanged. p_full_types:
-- the job types for which an idle worker has no free slot; enqueues do not choose it for them.
-- It waits for no transaction that has locked the row: then it changes nothing and returns NULL.
CREATE OR REPLACE FUNCTION touch_worker(
    p_worker_id text,
    p_idle boolean DEFAULT NULL,
    p_info jsonb DEFAULT NULL,
    p_life uuid DEFAULT '00000000-0000-0000-0000-000000000000',
    p_full_types text[] DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM FROM workers WHERE worker_id = left(p_worker_id, 100) AND life = p_life FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        UPDATE workers
        SET seen_at = clock_timestamp(), idle = coalesce(p_idle, idle), info = coalesce(p_info, info),
            full_types = coalesce(p_full_types, full_types)
        WHERE worker_id = left(p_worker_id, 100) AND life = p_life;
        RETURN true;
    END IF;
    IF EXISTS (SELECT FROM workers WHERE worker_id = left(p_worker_id, 100) AND life = p_life) THEN
        RETURN NULL;
    END IF;
    RETURN false;
END $$;

CREATE OR REPLACE FUNCTION remove_worker(
    p_worker_id text, p_life uuid DEFAULT '00000000-0000-0000-0000-000000000000')
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    DELETE FROM workers WHERE worker_id = left(p_worker_id, 100) AND life = p_life;
END $$;

-- Adds a worker's counts to its rows of the current ten seconds. Each row has one writer, the life of a
-- worker, so no transaction waits for another, and no reader has to count finished jobs (decision 0012).
-- Callers that name no life may share a row: the order keeps them from deadlocking.
CREATE OR REPLACE FUNCTION add_throughput(p_worker_id text, p_counts jsonb, p_life uuid) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    INSERT INTO throughput AS t (
        bucket, worker_id, life, queue, job_type,
        completed, failed, retried, cancelled, wait_seconds, run_seconds)
    SELECT date_bin('10 seconds', clock_timestamp(), timestamptz '2000-01-01'), left(p_worker_id, 100),
           p_life, c.queue, c.job_type, c.completed, c.failed, c.retried, c.cancelled, c.wait_seconds,
           c.run_seconds
    FROM jsonb_to_recordset(p_counts) AS c (
        queue text, job_type text, completed int, failed int, retried int, cancelled int,
        wait_seconds float8, run_seconds float8)
    ORDER BY c.queue COLLATE "C", c.job_type COLLATE "C"
    ON CONFLICT (bucket, queue, job_type, worker_id, life) DO UPDATE
    SET completed = t.completed + excluded.completed,
        failed = t.failed + excluded.failed,
        retried = t.retried + excluded.retried,
        cancelled = t.cancelled + excluded.cancelled,
        wait_seconds = t.wait_seconds + excluded.wait_seconds,
        run_seconds = t.run_seconds + excluded.run_seconds
$$;

-- A worker's heartbeat: its state, and its counts since the last heartbeat. Returns whether it is registered;
-- if it is not, because its row was pruned or the tables are new, it registers again. NULL: the row is locked.
CREATE OR REPLACE FUNCTION beat_worker(
    p_worker_id text,
    p_info jsonb,
    p_counts jsonb DEFAULT NULL,
    p_life uuid DEFAULT '00000000-0000-0000-0000-000000000000')
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF p_counts IS NOT NULL THEN
        PERFORM add_throughput(p_worker_id, p_counts, p_life);
    END IF;
    RETURN touch_worker(p_worker_id, NULL, p_info, p_life);
END $$;
