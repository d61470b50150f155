-- Enqueue jobs: one, many, or rows that were copied into live_jobs.
--
-- Owns the INSERT into live_jobs and the table idempotency_keys. Promises: an enqueue joins the caller's
-- transaction and waits for no other transaction, except one that holds an equal idempotency key (P5).
-- Callers send JSON: decision 0002.

-- UUIDv7 with the microsecond in its 12 spare bits, so that ids made here sort by creation time.
CREATE OR REPLACE FUNCTION new_job_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (
    SELECT (lpad(to_hex(t.us / 1000), 12, '0')
         || '7' || lpad(to_hex((t.us % 1000) * 4096 / 1000), 3, '0')
         || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS t);

-- Takes the idempotency keys of a batch and returns the job that owns each key. INSERT and SELECT are two
-- statements: in one statement, a concurrent transaction that commits in between would yield no row at all.
CREATE OR REPLACE FUNCTION take_idempotency_keys(p_keys text[], p_ids uuid[], p_ttl interval) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_owners jsonb;
    v_distinct int := (SELECT count(DISTINCT k) FROM unnest(p_keys) AS k);
BEGIN
    LOOP
        INSERT INTO idempotency_keys AS i (key, job_id, expires_at)
        SELECT DISTINCT ON (k.key) k.key, k.id, clock_timestamp() + p_ttl
        FROM unnest(p_keys, p_ids) WITH ORDINALITY AS k (key, id, n)
        ORDER BY k.key, k.n
        ON CONFLICT (key) DO UPDATE
        SET job_id = excluded.job_id, expires_at = excluded.expires_at
        WHERE i.expires_at <= clock_timestamp();

        SELECT jsonb_object_agg(i.key, i.job_id) INTO v_owners
        FROM idempotency_keys AS i
        WHERE i.key = ANY (p_keys);
        -- A key may have expired and been pruned between the two statements: retry.
        EXIT WHEN (SELECT count(*) FROM jsonb_object_keys(v_owners)) = v_distinct;
    END LOOP;
    RETURN v_owners;
END $$;

-- Enqueues one job without an idempotency key under the given id. Returns whether the job is new. A test
-- compares the result with that of enqueue_jobs, column by column (decision 0024).
CREATE OR REPLACE FUNCTION enqueue_single_job(p_id uuid, p_job jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_new record;
BEGIN
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
    PERFORM add_lane(v_new.queue, v_new.job_type, v_new.priority);
    PERFORM wake_workers(jsonb_build_array(jsonb_build_array(
        v_new.queue, v_new.job_type, extract(epoch FROM v_new.run_at), v_new.priority)));
    RETURN true;
END $$;

-- Enqueues an array of objects. Their members are named like the parameters of enqueue_job, without the p_;
-- `delay` is in seconds. p_again is for a client that did not receive the answer and resends: ids that are
-- already live or finished count as the same job, and are reported as new.
CREATE OR REPLACE FUNCTION enqueue_jobs(
    p_jobs jsonb,
    p_again boolean DEFAULT false,
    p_idempotency_ttl interval DEFAULT '7 days')
RETURNS TABLE (id uuid, is_new boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_owners jsonb;
    v_ended uuid[];
    v_lanes jsonb;
    v_lane jsonb;
    v_ids uuid[];
    v_requested uuid[];
    v_new uuid[];
BEGIN
    -- Most calls enqueue one job. Sets and joins would then cost more than the job itself.
    IF p_jobs -> 1 IS NULL AND jsonb_typeof(p_jobs -> 0) = 'object'
       AND p_jobs #>> '{0,idempotency_key}' IS NULL AND NOT p_again
    THEN
        id := coalesce((p_jobs #>> '{0,id}')::uuid, new_job_id());
        is_new := enqueue_single_job(id, p_jobs -> 0);
        RETURN NEXT;
        RETURN;
    END IF;

    -- Ids first: every statement below refers to jobs by id. Clients send their own.
    v_requested := ARRAY (SELECT (j ->> 'id')::uuid FROM jsonb_array_elements(p_jobs) AS j);
    IF array_position(v_requested, NULL) IS NOT NULL THEN
        v_requested := ARRAY (
            SELECT coalesce(a.id, new_job_id())
            FROM unnest(v_requested) WITH ORDINALITY AS a (id, n)
            ORDER BY a.n);
    END IF;
    v_ids := v_requested;

    IF jsonb_path_exists(p_jobs, '$[*].idempotency_key ? (@ != null)') THEN
        v_owners := (
            SELECT take_idempotency_keys(array_agg(k.key), array_agg(k.id), p_idempotency_ttl)
            FROM (SELECT j.value ->> 'idempotency_key' AS key, v_requested[j.n] AS id
                  FROM jsonb_array_elements(p_jobs) WITH ORDINALITY AS j (value, n)) AS k
            WHERE k.key IS NOT NULL);
        SELECT array_agg(coalesce((v_owners ->> (j.value ->> 'idempotency_key'))::uuid, v_requested[j.n])
                         ORDER BY j.n)
        INTO v_ids
        FROM jsonb_array_elements(p_jobs) WITH ORDINALITY AS j (value, n);
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
        WHERE v_ids[j.n] = v_requested[j.n]
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
        SELECT queue, job_type, priority, extract(epoch FROM min(run_at)) AS due
        FROM inserted
        GROUP BY queue, job_type, priority)
    SELECT (SELECT array_agg(id) FROM inserted),
           (SELECT jsonb_agg(jsonb_build_array(u.queue, u.job_type, u.due, u.priority)) FROM used_lanes AS u)
    INTO v_new, v_lanes;

    IF p_again THEN
        -- Not before the INSERT, which waits for a transaction that is finishing one of these jobs: a job
        -- inserted after such a wait has finished, and only a snapshot taken afterwards shows it.
        v_ended := ARRAY (SELECT f.id FROM finished_jobs AS f WHERE f.id = ANY (v_new));
        DELETE FROM live_jobs AS j WHERE j.id = ANY (v_ended);
    END IF;

    FOR v_lane IN SELECT * FROM jsonb_array_elements(v_lanes) LOOP
        PERFORM add_lane(v_lane ->> 0, v_lane ->> 1, (v_lane ->> 3)::int);
    END LOOP;
    PERFORM wake_workers(v_lanes);

    IF cardinality(v_new) = cardinality(v_ids) THEN
        RETURN QUERY SELECT i, true FROM unnest(v_ids) AS i;
    ELSE
        RETURN QUERY
        SELECT v.id, v.id = v.requested AND (p_again OR coalesce(v.id = ANY (v_new), false))
        FROM unnest(v_ids, v_requested) WITH ORDINALITY AS v (id, requested, n)
        ORDER BY v.n;
    END IF;
END $$;

-- For jobs that were copied into live_jobs in this transaction: adds their lanes, given as [[queue, job
-- type, priority], ...], and wakes workers, as enqueue_jobs does for its jobs (decision 0014).
CREATE OR REPLACE FUNCTION announce_jobs(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM add_lane(l ->> 0, l ->> 1, (l ->> 2)::int) FROM jsonb_array_elements(p_lanes) AS l;
    -- now() is the start of the transaction: no job in it is due earlier.
    PERFORM wake_workers(jsonb_agg(
        jsonb_build_array(l -> 0, l -> 1, extract(epoch FROM now()), l -> 2)))
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
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
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

-- INSERT INTO jobs enqueues. UPDATE and DELETE raise an error that names the functions to call.
CREATE OR REPLACE FUNCTION jobs_view_insert() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT
AS $$
BEGIN
    NEW.id := enqueue_job(
        NEW.job_type, coalesce(NEW.data, '{}'), coalesce(NEW.queue, 'default'),
        coalesce(NEW.priority, 100), NEW.run_at, coalesce(NEW.max_attempts, 3),
        NEW.idempotency_key, NEW.ordering_key, NEW.request_id, NEW.traceparent, NEW.keep, NEW.id);
    RETURN NEW;
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
