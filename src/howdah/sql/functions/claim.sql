-- Claim due jobs under a lease.
--
-- Owns the change from pending to claimed, and the insertion of leases: one for the jobs of a lane that are claimed at
-- once (decision 0045). Promises: one live lease per job (P3), order by priority and due
-- time (P7), a cost that does not grow with the backlog (P10). The bound of P7: a job whose transaction
-- commits more than head_margin() after its enqueue may be claimed after later ones.
--
-- The planner is pinned. With a generic plan or stale statistics it would hash or sort the whole table. The
-- plan is always the generic one: planning each claim would take longer than most claims take.

-- First checks every lane for a due job, then takes jobs from the lanes that have one, best lane first.
-- Filtering by type after the sort would make a backlog of one type slow down every other type.
--
-- The times of a claim are read when its statement has all locks on tables and indexes: it may wait for them, and a lease
-- that expired before its transaction could be noticed would not be found (see recover_late).
--
-- A claim starts at the lane's head (see lanes.sql), unless that lies in the future: then the server's clock
-- was ahead. Only sweep_lanes moves heads: a claim that moved one and stayed open could keep it where it hides a
-- job (decision 0031).
-- p_due_from is for a worker that was notified of a job: if its enqueue took long to commit, the heads may have passed
-- it. Lanes are searched from the notified due time on and no further back: below it are only dead entries.
--
-- p_suspects_alone: an earlier claim of a suspect expired before it started, so the suspect may have killed
-- that process. It is claimed alone and as started, so that it uses up its attempts and no other job's
-- (decision 0029). A worker passes false: it runs suspects one at a time itself. One claim in sixteen
-- takes suspects first: neither higher lanes that always hold some jobs nor a
-- locked job before it may keep a suspect waiting.
CREATE OR REPLACE FUNCTION claim_job_batch(
    p_worker_id text,
    p_job_types text[] DEFAULT NULL,
    p_batch_size int DEFAULT 10,
    p_lease interval DEFAULT '30 seconds',
    p_queues text[] DEFAULT '{default}',
    p_started boolean DEFAULT false,
    p_due_from timestamptz DEFAULT NULL,
    p_suspects_alone boolean DEFAULT true)
RETURNS SETOF jobs
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lease_id uuid;
    v_suspects_first boolean := random() < 0.0625;
    v_suspect uuid;
    v_left int := validate_claim(p_worker_id, p_batch_size, p_lease);
    v_worker text := left(p_worker_id, 100);
    v_claimed int;
    v_lane record;
    v_types jsonb := CASE WHEN cardinality(p_job_types) > 20 THEN hash_types(p_job_types) END;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    FOR v_lane IN
        SELECT d.queue, d.job_type, d.priority, d.first_run_at, p_suspects_alone AND d.is_suspect AS is_suspect
        FROM due_lanes(p_job_types, v_types, p_queues, v_now, p_due_from) AS d
        ORDER BY (p_suspects_alone AND d.is_suspect AND v_suspects_first) DESC, d.priority DESC, d.first_run_at
    LOOP
        v_suspect := NULL;
        IF p_suspects_alone AND (v_lane.is_suspect OR v_suspects_first) AND v_left = p_batch_size THEN
            v_suspect := lock_suspect(
                v_lane.queue, v_lane.job_type, v_lane.priority, v_lane.first_run_at, v_now);
            IF v_suspect IS NOT NULL THEN
                v_left := 1;
            END IF;
        END IF;
        v_lease_id := gen_random_uuid();
        RETURN QUERY
        WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
        claimed AS (
            UPDATE live_jobs AS j
            SET status = 'claimed',
                worker_id = v_worker,
                lease_id = v_lease_id,
                claims = j.claims + 1,
                attempts = j.attempts + 1,
                claimed_at = (SELECT c.now FROM clock AS c),
                started_at = CASE WHEN p_started OR v_suspect IS NOT NULL THEN (SELECT c.now FROM clock AS c) END,
                progress = 0,
                current_stage = NULL
            -- The rows are locked, so they keep their places.
            WHERE j.ctid = ANY (ARRAY (
                SELECT p.ctid
                FROM live_jobs AS p
                WHERE p.status = 'pending' AND p.blockers = 0
                  AND p.queue = v_lane.queue AND p.job_type = v_lane.job_type
                  AND p.priority = v_lane.priority
                  AND p.run_at >= v_lane.first_run_at
                  AND p.run_at <= v_now
                  AND p.attempts < p.max_attempts
                  AND CASE WHEN v_suspect IS NOT NULL THEN p.id = v_suspect
                           ELSE p.claims = p.attempts OR NOT p_suspects_alone END
                ORDER BY p.run_at, p.id
                LIMIT v_left
                FOR UPDATE SKIP LOCKED))
            RETURNING j.*),
        leased AS (
            INSERT INTO leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids)
            SELECT v_lease_id, v_worker, min(t.claimed_at), min(t.claimed_at), min(t.claimed_at) + p_lease, array_agg(t.id)
            FROM claimed AS t
            HAVING count(*) > 0)
        SELECT t.id, t.seq, t.queue::text, t.job_type::text, t.priority::int,
               CASE WHEN t.started_at IS NOT NULL THEN 'running' ELSE t.status END,
               t.data::jsonb, t.progress, t.current_stage, t.events_count,
               t.worker_id, t.lease_id, t.claimed_at + p_lease, t.claims, t.claimed_at,
               t.run_at::timestamptz, t.created_at, t.started_at, NULL::timestamptz,
               t.attempts, t.max_attempts::int, t.last_error, t.request_id::text, t.traceparent::text,
               t.idempotency_key::text, t.ordering_key::text, t.holds_key, t.blockers, t.cancel_requested,
               t.keep::interval, NULL::jsonb
        FROM claimed AS t
        ORDER BY t.run_at, t.id;
        GET DIAGNOSTICS v_claimed = ROW_COUNT;
        v_left := v_left - v_claimed;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;

-- claim_job_batch for a worker: it runs suspects one at a time itself, and needs few columns of a job. Starting a statement
-- with all columns costs more than the row of a job (decision 0045). `waited`: seconds since the job was due.
CREATE OR REPLACE FUNCTION claim_runs(
    p_worker_id text,
    p_job_types text[],
    p_batch_size int,
    p_lease interval,
    p_queues text[],
    p_due_from timestamptz DEFAULT NULL)
RETURNS TABLE (
    id uuid, lease_id uuid, job_type text, queue text, data text, attempts int, max_attempts int, claims int,
    request_id text, traceparent text, idempotency_key text, waited float8)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lease_id uuid;
    v_left int := validate_claim(p_worker_id, p_batch_size, p_lease);
    v_worker text := left(p_worker_id, 100);
    v_claimed int;
    v_lane record;
    v_types jsonb := CASE WHEN cardinality(p_job_types) > 20 THEN hash_types(p_job_types) END;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    FOR v_lane IN
        SELECT d.queue, d.job_type, d.priority, d.first_run_at
        FROM due_lanes(p_job_types, v_types, p_queues, v_now, p_due_from) AS d
        ORDER BY d.priority DESC, d.first_run_at
    LOOP
        v_lease_id := gen_random_uuid();
        RETURN QUERY
        WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
        claimed AS (
            UPDATE live_jobs AS j
            SET status = 'claimed',
                worker_id = v_worker,
                lease_id = v_lease_id,
                claims = j.claims + 1,
                attempts = j.attempts + 1,
                claimed_at = (SELECT c.now FROM clock AS c),
                started_at = NULL,
                progress = 0,
                current_stage = NULL
            -- The rows are locked, so they keep their places.
            WHERE j.ctid = ANY (ARRAY (
                SELECT p.ctid
                FROM live_jobs AS p
                WHERE p.status = 'pending' AND p.blockers = 0
                  AND p.queue = v_lane.queue AND p.job_type = v_lane.job_type
                  AND p.priority = v_lane.priority
                  AND p.run_at >= v_lane.first_run_at
                  AND p.run_at <= v_now
                  AND p.attempts < p.max_attempts
                ORDER BY p.run_at, p.id
                LIMIT v_left
                FOR UPDATE SKIP LOCKED))
            RETURNING j.id, j.job_type, j.queue, j.data, j.attempts, j.max_attempts, j.claims, j.request_id,
                      j.traceparent, j.idempotency_key, j.run_at, j.claimed_at),
        leased AS (
            INSERT INTO leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids)
            SELECT v_lease_id, v_worker, min(t.claimed_at), min(t.claimed_at), min(t.claimed_at) + p_lease, array_agg(t.id)
            FROM claimed AS t
            HAVING count(*) > 0)
        SELECT t.id, v_lease_id, t.job_type::text, t.queue::text, t.data::text, t.attempts, t.max_attempts::int, t.claims,
               t.request_id::text, t.traceparent::text, t.idempotency_key::text,
               extract(epoch FROM t.claimed_at - t.run_at)::float8
        FROM claimed AS t
        ORDER BY t.run_at, t.id;
        GET DIAGNOSTICS v_claimed = ROW_COUNT;
        v_left := v_left - v_claimed;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;

-- An object as a hash table, for many job types: each lane would search an array linearly.
CREATE OR REPLACE FUNCTION hash_types(p_job_types text[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT jsonb_object_agg(t, 1) FROM unnest(p_job_types) AS t);

-- Locks the first due job of a lane that no other transaction has locked. Returns its id if it is a suspect.
CREATE OR REPLACE FUNCTION lock_suspect(
    p_queue text, p_job_type text, p_priority int, p_from timestamptz, p_until timestamptz)
RETURNS uuid
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
    SELECT CASE WHEN first.claims > first.attempts THEN first.id END
    FROM (
        SELECT j.id, j.claims, j.attempts
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = p_queue AND j.job_type = p_job_type AND j.priority = p_priority
          AND j.run_at >= p_from AND j.run_at <= p_until
          AND j.attempts < j.max_attempts
        ORDER BY j.run_at, j.id
        LIMIT 1
        FOR UPDATE SKIP LOCKED) AS first
$$;

-- Raises if the parameters of a claim are invalid. Returns the batch size, so that a claim can check them
-- in an expression and needs no extra statement (decision 0024).
CREATE OR REPLACE FUNCTION validate_claim(p_worker_id text, p_batch_size int, p_lease interval) RETURNS int
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT
AS $$
BEGIN
    IF coalesce(p_worker_id, '') = '' THEN
        RAISE EXCEPTION 'p_worker_id is empty: name the worker that claims'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_batch_size IS NULL OR p_batch_size NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'p_batch_size is %: it must be between 1 and 10000', p_batch_size
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM validate_lease(p_lease);
    RETURN p_batch_size;
END $$;

-- The due time of the first job in these lanes that is due after p_after, so that no worker sleeps past it.
-- The default includes jobs that became due in the last 100 ms: the claim before may have missed them.
CREATE OR REPLACE FUNCTION next_due_at(
    p_job_types text[] DEFAULT NULL,
    p_queues text[] DEFAULT '{default}',
    p_after timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN (
    SELECT min(first.run_at)
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT j.run_at
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
          AND j.run_at > coalesce(p_after, statement_timestamp() - interval '100 milliseconds')
        ORDER BY j.run_at, j.id
        LIMIT 1) AS first
    WHERE l.queue = ANY (p_queues)
      AND (p_job_types IS NULL OR l.job_type = ANY (p_job_types)));
END $$;

-- Enqueues one job and claims it in the same transaction, so that the calling process runs it; if that
-- process crashes, a worker runs the job. Returns no lease_id if the id or the idempotency key exists; the id
-- is then that of the first job. A caller that chooses p_lease_id can resend a call whose answer was lost,
-- without p_fresh_ids (see enqueue_jobs).
CREATE OR REPLACE FUNCTION enqueue_and_claim(
    p_job jsonb,
    p_worker_id text,
    p_lease interval DEFAULT '30 seconds',
    p_idempotency_ttl interval DEFAULT '7 days',
    p_lease_id uuid DEFAULT NULL,
    p_fresh_ids boolean DEFAULT false)
RETURNS TABLE (id uuid, lease_id uuid)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz;
    v_id uuid;
    v_is_new boolean;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM validate_claim(p_worker_id, 1, p_lease);
    IF p_job ->> 'ordering_key' IS NOT NULL THEN
        RAISE EXCEPTION 'a job with an ordering key waits for its key and cannot be claimed as it is enqueued'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT e.id, e.is_new INTO v_id, v_is_new
    FROM enqueue_jobs(jsonb_build_array(p_job), false, p_idempotency_ttl, p_fresh_ids) AS e;
    IF NOT v_is_new THEN
        RETURN QUERY
        SELECT v_id, (SELECT j.lease_id FROM live_jobs AS j
                      WHERE j.id = v_id AND j.lease_id = p_lease_id);
        RETURN;
    END IF;
    v_now := clock_timestamp();  -- after the enqueue, which may have waited for an idempotency key
    p_lease_id := coalesce(p_lease_id, gen_random_uuid());
    INSERT INTO leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids)
    SELECT p_lease_id, left(p_worker_id, 100), c.now, c.now, c.now + p_lease, ARRAY[v_id]
    FROM (SELECT clock_timestamp() AS now) AS c;
    RETURN QUERY
    UPDATE live_jobs AS j
    SET status = 'claimed',
        worker_id = left(p_worker_id, 100),
        lease_id = p_lease_id,
        claims = 1,
        attempts = 1,
        claimed_at = v_now,
        started_at = v_now
    WHERE j.id = v_id
    RETURNING j.id, j.lease_id;
END $$;
