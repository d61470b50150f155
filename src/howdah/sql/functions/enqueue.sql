-- Enqueue jobs: one, many, or rows that were copied into live_jobs.
--
-- Owns the INSERT into live_jobs. Promises: an enqueue joins the caller's transaction and waits for no other
-- transaction, except one that enqueues an equal id or idempotency key (P5); an id that exists, live or
-- finished, is the same job. Callers send JSON: decision 0002.

-- UUIDv7 with the microsecond in its 12 spare bits, so that ids made here sort by creation time.
CREATE OR REPLACE FUNCTION new_job_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (
    SELECT (lpad(to_hex(t.us / 1000), 12, '0')
         || '7' || lpad(to_hex((t.us % 1000) * 4096 / 1000), 3, '0')
         || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS t);

-- Whether an id holds a time within a minute of now: then it is a UUIDv7 that was just made, and p_fresh_ids is
-- believed. The trigger live_jobs_refuse_finished has the same condition.
CREATE OR REPLACE FUNCTION is_recent_id(p_id uuid) RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN abs(('x' || translate(left(p_id::text, 13), '-', ''))::bit(48)::bigint / 1000
           - extract(epoch FROM clock_timestamp())) <= 60;

-- Refuses the id of a finished job in a row that was inserted into live_jobs directly. SECURITY DEFINER, because
-- producers may not read finished jobs.
CREATE OR REPLACE FUNCTION refuse_finished_id() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_finished finished_jobs := find_finished(NEW.id);
BEGIN
    IF v_finished.id IS NOT NULL THEN
        RAISE EXCEPTION 'job % exists and is finished: a row of live_jobs needs a new id', NEW.id
            USING ERRCODE = 'unique_violation',
                  HINT = 'Call enqueue_jobs, for which a job whose id exists is the same job.';
    END IF;
    RETURN NULL;
END $$;

-- Which of these jobs exist, live or finished. Live jobs are read first: a job that finishes or is reopened
-- meanwhile is in one of the two.
CREATE OR REPLACE FUNCTION existing_jobs(p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_live uuid[] := ARRAY (SELECT j.id FROM live_jobs AS j WHERE j.id = ANY (p_ids));
BEGIN
    IF v_live @> p_ids THEN
        RETURN v_live;
    END IF;
    RETURN v_live || finished_ids(p_ids);
END $$;

-- Refuses PREPARE TRANSACTION for the rest of this transaction: every function of the contract that writes calls
-- it. Without this, PostgreSQL refuses it only if
-- the transaction has notified a worker; and the locks of a prepared transaction last until an operator ends
-- it. Called only on servers that allow prepared transactions. A background process cannot listen, and has
-- no client that could prepare (decision 0034).
CREATE OR REPLACE FUNCTION refuse_two_phase_commit() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    EXECUTE format('LISTEN %I', current_schema() || ':prepare');
    EXECUTE format('UNLISTEN %I', current_schema() || ':prepare');
EXCEPTION WHEN feature_not_supported THEN
    NULL;
END $$;

-- Enqueues one job without an idempotency key under the given id. Returns whether the job is new. A test
-- compares the result with that of enqueue_jobs, column by column (decision 0024).
CREATE OR REPLACE FUNCTION enqueue_single_job(p_id uuid, p_job jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_new record;
BEGIN
    IF p_job ->> 'ordering_key' IS NOT NULL THEN
        PERFORM defer_keys();
    END IF;
    INSERT INTO live_jobs (
        id, queue, job_type, priority, data, max_attempts, run_at,
        ordering_key, request_id, traceparent, keep, blockers)
    VALUES (
        p_id, coalesce(p_job ->> 'queue', 'default'), p_job ->> 'job_type',
        coalesce((p_job ->> 'priority')::int, 100), coalesce(nullif(p_job -> 'data', 'null'), '{}'),
        coalesce((p_job ->> 'max_attempts')::int, 3),
        greatest(coalesce((p_job ->> 'run_at')::timestamptz,
                          clock_timestamp() + make_interval(secs => (p_job ->> 'delay')::float8)),
                 clock_timestamp()),
        p_job ->> 'ordering_key', p_job ->> 'request_id', p_job ->> 'traceparent',
        (p_job ->> 'keep')::interval, (p_job ->> 'ordering_key' IS NOT NULL)::int)
    ON CONFLICT (id) DO NOTHING
    RETURNING queue, job_type, priority, run_at INTO v_new;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM add_lane(v_new.queue, v_new.job_type, v_new.priority);
    PERFORM wake_workers(jsonb_build_array(jsonb_build_array(
        v_new.queue, v_new.job_type, extract(epoch FROM v_new.run_at), v_new.priority)));
    RETURN true;
END $$;

-- Enqueues an array of objects. Their members are named like the parameters of enqueue_job, without the p_;
-- `delay` is in seconds. A job whose id exists, live or finished, is the same job and not enqueued again.
--
-- p_again is for a client that did not receive the answer and resends: jobs that exist are reported as new.
-- p_fresh_ids promises that every id was made for this call, so that they need not be looked up among the
-- finished jobs, which are in one partition per day. Ids whose time is not within a minute of now are looked up
-- all the same: a producer must not hide a finished job behind a new one.
CREATE OR REPLACE FUNCTION enqueue_jobs(
    p_jobs jsonb,
    p_again boolean DEFAULT false,
    p_idempotency_ttl interval DEFAULT '7 days',
    p_fresh_ids boolean DEFAULT false)
RETURNS TABLE (id uuid, is_new boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_ended uuid[];
    v_lanes jsonb;
    v_lane jsonb;
    v_ids uuid[];
    v_requested uuid[];
    v_given uuid[];
    v_known uuid[] := '{}';
    v_new uuid[];
BEGIN
    -- Most calls enqueue one job. Sets and joins would then cost more than the job itself.
    IF p_jobs -> 1 IS NULL AND jsonb_typeof(p_jobs -> 0) = 'object'
       AND p_jobs #>> '{0,idempotency_key}' IS NULL AND NOT p_again
       AND (p_jobs #>> '{0,id}' IS NULL OR (p_fresh_ids AND is_recent_id((p_jobs #>> '{0,id}')::uuid)))
    THEN
        id := coalesce((p_jobs #>> '{0,id}')::uuid, new_job_id());
        is_new := enqueue_single_job(id, p_jobs -> 0);
        RETURN NEXT;
        RETURN;
    END IF;

    -- Ids first: every statement below refers to jobs by id. Clients send their own.
    v_requested := ARRAY (SELECT (j ->> 'id')::uuid FROM jsonb_array_elements(p_jobs) AS j);
    v_given := array_remove(v_requested, NULL);
    IF p_fresh_ids AND NOT p_again THEN
        v_given := ARRAY (SELECT g FROM unnest(v_given) AS g WHERE NOT is_recent_id(g));
    END IF;
    IF v_given <> '{}' THEN
        v_known := existing_jobs(v_given);
        IF p_again OR NOT p_fresh_ids THEN
            PERFORM require_read_committed(v_given, v_known);
        END IF;
    END IF;
    IF array_position(v_requested, NULL) IS NOT NULL THEN
        v_requested := ARRAY (
            SELECT coalesce(a.id, new_job_id())
            FROM unnest(v_requested) WITH ORDINALITY AS a (id, n)
            ORDER BY a.n);
    END IF;
    v_ids := v_requested;

    IF jsonb_path_exists(p_jobs, '$[*].idempotency_key ? (@ != null)') THEN
        -- A job that exists has taken its key, or lost it when it failed.
        SELECT take_idempotency_keys(
                   array_agg(j.value ->> 'job_type' ORDER BY j.n),
                   array_agg(CASE WHEN v_requested[j.n] <> ALL (v_known)
                                  THEN j.value ->> 'idempotency_key' END ORDER BY j.n),
                   v_requested,
                   array_agg(jsonb_hash_extended(coalesce(nullif(j.value -> 'data', 'null'), '{}'), 0)
                             ORDER BY j.n),
                   array_agg(coalesce((j.value ->> 'idempotency_ttl')::interval, p_idempotency_ttl)
                             ORDER BY j.n))
        INTO v_ids
        FROM jsonb_array_elements(p_jobs) WITH ORDINALITY AS j (value, n);
    END IF;

    IF jsonb_path_exists(p_jobs, '$[*].ordering_key ? (@ != null)') THEN
        PERFORM defer_keys();
    END IF;
    WITH incoming AS (
        SELECT j.*
        FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
            job_type text, data jsonb, queue text, priority int, run_at timestamptz, delay float8,
            max_attempts int, idempotency_key text, ordering_key text, request_id text,
            traceparent text, keep interval)) WITH ORDINALITY AS j (
            job_type, data, queue, priority, run_at, delay,
            max_attempts, idempotency_key, ordering_key, request_id,
            traceparent, keep, n)
        WHERE v_ids[j.n] = v_requested[j.n] AND v_requested[j.n] <> ALL (v_known)
        ORDER BY j.n),
    inserted AS (
        INSERT INTO live_jobs (
            id, queue, job_type, priority, data, max_attempts, run_at,
            idempotency_key, ordering_key, request_id, traceparent, keep, blockers)
        SELECT v_requested[i.n], coalesce(i.queue, 'default'), i.job_type, coalesce(i.priority, 100),
               coalesce(i.data, '{}'), coalesce(i.max_attempts, 3),
               greatest(coalesce(i.run_at, clock_timestamp() + make_interval(secs => i.delay)),
                        clock_timestamp()),
               i.idempotency_key, i.ordering_key, i.request_id, i.traceparent, i.keep,
               (i.ordering_key IS NOT NULL)::int
        FROM incoming AS i
        ON CONFLICT (id) DO NOTHING
        RETURNING id, queue, job_type, priority, run_at),
    used_lanes AS (
        SELECT queue, job_type, priority, extract(epoch FROM min(run_at)) AS due, count(*) AS jobs
        FROM inserted
        GROUP BY queue, job_type, priority)
    SELECT (SELECT array_agg(id) FROM inserted),
           (SELECT jsonb_agg(jsonb_build_array(u.queue, u.job_type, u.due, u.priority, u.jobs))
            FROM used_lanes AS u)
    INTO v_new, v_lanes;

    IF v_given <> '{}' AND v_new IS NOT NULL THEN
        -- A second time, after the INSERT: it waits for a transaction that enqueues the same id, and by then
        -- the job may have run and finished. Only a snapshot taken afterwards shows it.
        v_ended := finished_ids(v_new);
        IF v_ended <> '{}' THEN
            DELETE FROM live_jobs AS j WHERE j.id = ANY (v_ended);
            PERFORM free_idempotency_keys(v_ended);
            v_new := ARRAY (SELECT n FROM unnest(v_new) AS n WHERE n <> ALL (v_ended));
        END IF;
    END IF;

    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    FOR v_lane IN SELECT * FROM jsonb_array_elements(v_lanes) LOOP
        PERFORM add_lane(v_lane ->> 0, v_lane ->> 1, (v_lane ->> 3)::int);
    END LOOP;
    PERFORM wake_workers(v_lanes);

    IF cardinality(v_new) = cardinality(v_ids) THEN
        RETURN QUERY SELECT i, true FROM unnest(v_ids) AS i;
    ELSE
        RETURN QUERY
        SELECT v.id,
               v.id = v.requested
               AND (p_again OR (coalesce(v.id = ANY (v_new), false)
                                AND row_number() OVER (PARTITION BY v.id ORDER BY v.n) = 1))
        FROM unnest(v_ids, v_requested) WITH ORDINALITY AS v (id, requested, n)
        ORDER BY v.n;
    END IF;
END $$;

-- The snapshot of a stricter transaction does not show a job that was enqueued and finished since, so it
-- cannot decide whether an id is new.
CREATE OR REPLACE FUNCTION require_read_committed(p_given uuid[], p_known uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT sees_new_commits() AND NOT p_known @> p_given THEN
        RAISE EXCEPTION 'a job with an id of your own cannot be enqueued in a transaction that is %: its snapshot '
                        'may not show that the job exists', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Use READ COMMITTED, leave out the id, or use an idempotency key.';
    END IF;
END $$;

-- For jobs that were copied into live_jobs in this transaction: adds their lanes, given as [[queue, job
-- type, priority], ...], and wakes workers, as enqueue_jobs does for its jobs (decision 0014).
CREATE OR REPLACE FUNCTION announce_jobs(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM add_lanes(p_lanes);
    -- now() is the start of the transaction: no job in it is due earlier. How many jobs were copied is not
    -- known, and COPY is for many: every idle worker is woken.
    PERFORM wake_workers(jsonb_agg(
        jsonb_build_array(l -> 0, l -> 1, extract(epoch FROM now()), l -> 2, 10000)))
    FROM jsonb_array_elements(p_lanes) AS l;
END $$;

-- Enqueues one job and returns its id. If the idempotency key is taken: the id of the job that owns it.
CREATE OR REPLACE FUNCTION enqueue_job(
    p_job_type text,
    p_data jsonb DEFAULT '{}',
    p_queue text DEFAULT 'default',
    p_priority int DEFAULT 100,
    p_run_at timestamptz DEFAULT NULL,
    p_max_attempts int DEFAULT 3,
    p_idempotency_key text DEFAULT NULL,
    p_ordering_key text DEFAULT NULL,
    p_request_id text DEFAULT NULL,
    p_traceparent text DEFAULT NULL,
    p_keep interval DEFAULT NULL,
    p_id uuid DEFAULT NULL,
    p_idempotency_ttl interval DEFAULT '7 days')
RETURNS uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
    SELECT e.id
    FROM enqueue_jobs(
        jsonb_build_array(jsonb_build_object(
            'id', p_id, 'job_type', p_job_type, 'data', p_data, 'queue', p_queue,
            'priority', p_priority, 'run_at', p_run_at, 'max_attempts', p_max_attempts,
            'idempotency_key', p_idempotency_key, 'ordering_key', p_ordering_key,
            'request_id', p_request_id, 'traceparent', p_traceparent, 'keep', p_keep)),
        false,
        p_idempotency_ttl) AS e
$$;

-- INSERT INTO jobs enqueues. A value that a new job does not have is refused, and RETURNING shows the job as it
-- is: the first job, if the id or the idempotency key exists. SECURITY DEFINER, to read the job that was
-- enqueued. UPDATE and DELETE raise an error that names the functions to call.
CREATE OR REPLACE FUNCTION jobs_view_insert() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_refused text := (
        SELECT string_agg(format('%s = %s', g.key, left(g.value::text, 100)), ', ' ORDER BY g.key)
        FROM jsonb_each(jsonb_strip_nulls(to_jsonb(NEW) - 'data')) AS g
        WHERE g.key <> ALL ('{id,job_type,queue,priority,run_at,max_attempts,idempotency_key,ordering_key,
                              request_id,traceparent,keep}')
          AND g.value IS DISTINCT FROM
              '{"status": "pending", "progress": 0, "events_count": 0, "claims": 0, "attempts": 0,
                "blockers": 0, "holds_key": false, "cancel_requested": false}'::jsonb -> g.key);
    v_found jobs;
BEGIN
    IF v_refused IS NOT NULL OR NEW.result IS NOT NULL THEN
        RAISE EXCEPTION 'INSERT INTO "jobs" enqueues a new job, which cannot have %',
                        coalesce(v_refused, 'result = null')
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Insert id, job_type, data, queue, priority, run_at, max_attempts, idempotency_key, '
                         'ordering_key, request_id, traceparent and keep only. Do not insert finished jobs.';
    END IF;
    NEW.id := enqueue_job(
        NEW.job_type, coalesce(NEW.data, '{}'), coalesce(NEW.queue, 'default'),
        coalesce(NEW.priority, 100), NEW.run_at, coalesce(NEW.max_attempts, 3),
        NEW.idempotency_key, NEW.ordering_key, NEW.request_id, NEW.traceparent, NEW.keep, NEW.id);
    SELECT j.* INTO v_found FROM get_jobs(ARRAY[NEW.id]) AS j;
    RETURN v_found;
END $$;

-- Raises an error in a session whose session_replication_role is `replica`: the triggers of the view jobs do not
-- run there, and an INSERT would be lost. It is the default of a column of that view.
CREATE OR REPLACE FUNCTION refuse_replica_role() RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('session_replication_role') = 'replica' THEN
        RAISE EXCEPTION 'INSERT INTO "jobs" does nothing while session_replication_role is replica'
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Call enqueue_job or enqueue_jobs, or SET session_replication_role = origin.';
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION jobs_view_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT
AS $$
BEGIN
    RAISE EXCEPTION '% on the view "jobs" is not allowed: jobs change through functions only', TG_OP
        USING ERRCODE = 'feature_not_supported',
              HINT = format('Call %1$s.cancel_jobs, %1$s.retry_jobs, %1$s.fail_jobs, '
                            '%1$s.complete_jobs or %1$s.clear_finished.',
                            quote_ident(TG_TABLE_SCHEMA));
END $$;
