-- Recover stale jobs: claimed jobs whose lease expired because the worker crashed or lost its connection.
--
-- Promises: work resumes by itself within the lease + 5 s (P9), and a job whose attempts are used up ends
-- as failed (P4). requeue_jobs in acknowledge.sql decides between the two.

-- Requeues jobs whose lease expired (p_timeout NULL), or that were claimed longer ago than p_timeout; ends
-- those with no attempts left as failed. Returns the number of stale jobs.
CREATE OR REPLACE FUNCTION recover_stale_jobs(p_timeout interval DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_stale uuid[];
BEGIN
    v_stale := lock_stale_jobs(
        p_timeout, p_limit, '-infinity',
        CASE WHEN p_timeout IS NULL THEN clock_timestamp() ELSE 'infinity' END);
    IF v_stale <> '{}' THEN
        PERFORM requeue_jobs(
            v_stale, 'recover', 'the lease expired; the worker stopped or lost its connection');
    END IF;
    RETURN cardinality(v_stale);
END $$;

-- Locks stale jobs whose lease expires between p_from and p_until. These are parameters because an index
-- cannot be searched by a volatile clock: the scan would visit every job in flight.
CREATE OR REPLACE FUNCTION lock_stale_jobs(
    p_timeout interval, p_limit int, p_from timestamptz, p_until timestamptz)
RETURNS uuid[]
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    SELECT ARRAY (
        SELECT stale.id
        FROM (SELECT DISTINCT l.queue, l.job_type FROM lanes AS l) AS t
        CROSS JOIN LATERAL (
            SELECT j.id
            FROM live_jobs AS j
            WHERE j.status = 'claimed' AND j.queue = t.queue AND j.job_type = t.job_type
              AND j.lease_expires_at BETWEEN p_from AND p_until
              AND (p_timeout IS NULL OR j.claimed_at <= clock_timestamp() - p_timeout)
            ORDER BY j.lease_expires_at
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED) AS stale
        LIMIT p_limit)
$$;

-- The duty `recover`. It starts where the previous run ended: leases are set to expire in the future, so
-- that run handled what had expired by then. Leases that were committed after they expired, and rows that
-- were locked, are left to sweep_lanes, which checks all jobs (decision 0005).
CREATE OR REPLACE FUNCTION recover_expired(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_started timestamptz := clock_timestamp();
    v_stale uuid[];
BEGIN
    v_stale := lock_stale_jobs(
        NULL, p_limit, (SELECT m.reached FROM maintenance AS m WHERE m.duty = 'recover'), v_started);
    IF v_stale <> '{}' THEN
        PERFORM requeue_jobs(
            v_stale, 'recover', 'the lease expired; the worker stopped or lost its connection');
    END IF;
    IF cardinality(v_stale) < p_limit THEN
        UPDATE maintenance SET reached = v_started - head_margin() WHERE duty = 'recover';
    END IF;
    RETURN cardinality(v_stale);
END $$;
