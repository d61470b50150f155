-- What was done, in buckets of ten seconds: each worker adds up its own counts and writes them with its
-- heartbeat, so nobody ever has to count finished jobs.
CREATE TABLE throughput (
    bucket      timestamptz NOT NULL,
    worker_id   text        COLLATE "C" NOT NULL,
    queue       text        COLLATE "C" NOT NULL,
    job_type    text        COLLATE "C" NOT NULL,
    completed   int         NOT NULL DEFAULT 0,
    failed      int         NOT NULL DEFAULT 0,
    retried     int         NOT NULL DEFAULT 0,
    cancelled   int         NOT NULL DEFAULT 0,
    wait_seconds float8     NOT NULL DEFAULT 0,  -- from due to claimed, summed up
    run_seconds  float8     NOT NULL DEFAULT 0,
    CONSTRAINT throughput_pkey PRIMARY KEY (bucket, queue, job_type, worker_id)
) WITH (fillfactor = 70);

CREATE FUNCTION add_throughput(p_worker_id text, p_counts jsonb) RETURNS void
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

-- A worker's heartbeat about itself: it lives, it runs so much, and this is what it did since the last one.
CREATE FUNCTION beat_worker(p_worker_id text, p_info jsonb, p_counts jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM touch_worker(p_worker_id, NULL, p_info);
    IF p_counts IS NOT NULL THEN
        PERFORM add_throughput(p_worker_id, p_counts);
    END IF;
END $$;

CREATE FUNCTION prune_throughput() RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$ DELETE FROM throughput WHERE bucket < clock_timestamp() - interval '1 day' $$;

CREATE OR REPLACE FUNCTION run_duty(p_duty text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    CASE p_duty
        WHEN 'recover' THEN PERFORM recover_expired();
        WHEN 'settle' THEN PERFORM settle_keys();
        WHEN 'sweep' THEN PERFORM sweep();
        WHEN 'prune' THEN PERFORM prune(), prune_throughput();
        WHEN 'leaves' THEN PERFORM tend_leaves();
    END CASE;
END $$;
