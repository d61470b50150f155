-- What workers, watchers and the task runner add to the contract.

-- Announces a worker, idle at first, and makes the lanes of its tasks, so that no enqueue has to.
CREATE FUNCTION register_worker(
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

-- Says that a worker lives. p_idle NULL leaves the flag as it is.
CREATE FUNCTION touch_worker(p_worker_id text, p_idle boolean DEFAULT NULL, p_info jsonb DEFAULT NULL)
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    UPDATE workers
    SET seen_at = clock_timestamp(), idle = coalesce(p_idle, idle), info = coalesce(p_info, info)
    WHERE worker_id = left(p_worker_id, 100)
$$;

CREATE FUNCTION remove_worker(p_worker_id text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$ DELETE FROM workers WHERE worker_id = left(p_worker_id, 100) $$;

-- Ends claimed jobs as cancelled: their handlers were stopped, or asked for it.
CREATE FUNCTION stop_jobs(p_ids uuid[], p_lease_ids uuid[], p_reasons text[] DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    v_mine uuid[] := lock_leased(p_ids, p_lease_ids);
BEGIN
    PERFORM finish_jobs(v_mine, 'cancelled', NULL, p_reasons);
    RETURN QUERY SELECT m FROM unnest(v_mine) AS m WHERE m IS NOT NULL;
END $$;

-- Takes claimed jobs away from their workers, who are told, and puts them back for another one. The
-- attempt that is cut off does not count.
CREATE FUNCTION takeover_jobs(p_ids uuid[]) RETURNS SETOF uuid
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
    PERFORM return_jobs(v_ids, 'release');
    PERFORM tell_workers(v_ids);
    RETURN QUERY SELECT i FROM unnest(v_ids) AS i;
END $$;

-- Enqueues one job and claims it at once, so that this process runs it and a worker takes over if the
-- process dies. No lease_id: the idempotency key was taken, and the id is the first job's.
-- A caller that names the lease may repeat a call whose answer was never heard.
CREATE FUNCTION enqueue_and_claim(
    p_job jsonb,
    p_worker_id text,
    p_lease interval DEFAULT '30 seconds',
    p_idempotency_ttl interval DEFAULT '7 days',
    p_lease_id uuid DEFAULT NULL)
RETURNS TABLE (id uuid, lease_id uuid)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_id uuid;
    v_is_new boolean;
BEGIN
    PERFORM check_claim(p_worker_id, 1, p_lease);
    IF p_job ->> 'ordering_key' IS NOT NULL THEN
        RAISE EXCEPTION 'a job with an ordering key waits for its turn and cannot be claimed at once'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT e.id, e.is_new INTO v_id, v_is_new
    FROM enqueue_jobs(jsonb_build_array(p_job), false, p_idempotency_ttl) AS e;
    IF NOT v_is_new THEN
        RETURN QUERY
        SELECT v_id, (SELECT j.lease_id FROM live_jobs AS j
                      WHERE j.id = v_id AND j.lease_id = p_lease_id);
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE live_jobs AS j
    SET status = 'claimed',
        worker_id = left(p_worker_id, 100),
        lease_id = coalesce(p_lease_id, gen_random_uuid()),
        lease_expires_at = v_now + p_lease,
        claims = 1,
        attempts = 1,
        claimed_at = v_now,
        started_at = v_now
    WHERE j.id = v_id
    RETURNING j.id, j.lease_id;
END $$;

-- Appends events to jobs that this very lease has completed: a handler that ends its job in a transaction
-- of its own may do so before its last reports are written.
CREATE FUNCTION add_late_events(p_ids uuid[], p_lease_ids uuid[], p_kinds text[], p_datas jsonb[])
RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_mine uuid[];
BEGIN
    v_mine := ARRAY (
        SELECT f.id
        FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
        JOIN finished_jobs AS f ON f.id = a.id AND f.lease_id = a.lease_id
        FOR NO KEY UPDATE OF f SKIP LOCKED);
    RETURN QUERY
    WITH written AS (
        INSERT INTO job_events (job_id, attempt, kind, data)
        SELECT f.id, f.attempts, e.kind, coalesce(e.data, '{}')
        FROM unnest(p_ids, p_kinds, p_datas) WITH ORDINALITY AS e (id, kind, data, n)
        JOIN finished_jobs AS f ON f.id = e.id
        WHERE e.id = ANY (v_mine)
        ORDER BY e.n
        RETURNING job_id)
    UPDATE finished_jobs AS f
    SET events_count = f.events_count + w.events
    FROM (SELECT job_id, count(*)::int AS events FROM written GROUP BY job_id) AS w
    WHERE f.id = w.job_id
    RETURNING f.id;
    PERFORM tell_watchers(v_mine);
END $$;

-- Asks to be told, on the channel schema:job, of every change to these jobs for a while.
CREATE FUNCTION watch_jobs(p_watcher text, p_ids uuid[], p_for interval DEFAULT '1 minute') RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    INSERT INTO watchers (job_id, watcher, until)
    SELECT i, left(p_watcher, 200), clock_timestamp() + p_for
    FROM unnest(p_ids) AS i
    ORDER BY i
    ON CONFLICT (job_id, watcher) DO UPDATE SET until = excluded.until
$$;

CREATE FUNCTION unwatch_jobs(p_watcher text, p_ids uuid[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$ DELETE FROM watchers WHERE watcher = left(p_watcher, 200) AND job_id = ANY (p_ids) $$;
