-- Enqueueing. It joins the caller's transaction and waits for nobody (equal idempotency keys aside).

-- Adds a lane unless somebody else is just adding it: their commit, or the sweep, will show it.
CREATE FUNCTION add_lane(p_queue text, p_job_type text, p_priority int, p_twin boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT EXISTS (
           SELECT FROM lanes AS l
           WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority)
       AND pg_try_advisory_xact_lock(hashtextextended(
           concat_ws(':', current_schema(), 'lane', p_twin, p_priority, p_queue, p_job_type), 0))
    THEN
        INSERT INTO lanes (queue, job_type, priority, twin)
        VALUES (p_queue, p_job_type, p_priority, p_twin)
        ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- Takes the idempotency keys of a batch and says which job owns each. Insert, then read, as two
-- statements: in one, a rival that commits meanwhile would give no row at all.
CREATE FUNCTION take_idempotency_keys(p_keys text[], p_ids uuid[], p_ttl interval) RETURNS jsonb
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
        -- A key may have expired and been pruned between the two statements: take it again.
        EXIT WHEN (SELECT count(*) FROM jsonb_object_keys(v_owners)) = v_distinct;
    END LOOP;
    RETURN v_owners;
END $$;

-- Enqueues one job under an id, without an idempotency key. Gives whether it is new.
CREATE FUNCTION enqueue_alone(p_id uuid, p_job jsonb) RETURNS boolean
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

-- Enqueues an array of objects whose members are named like the parameters of enqueue_job, less
-- the p_. `delay` is in seconds. With p_again an enqueue whose outcome was never heard is repeated:
-- ids that are live or finished already are taken for the same job, and answered as new.
CREATE FUNCTION enqueue_jobs(
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
    v_asked uuid[];
    v_new uuid[];
BEGIN
    -- One job is what most calls enqueue. What sets and joins cost is then more than the job itself.
    IF p_jobs -> 1 IS NULL AND jsonb_typeof(p_jobs -> 0) = 'object'
       AND p_jobs #>> '{0,idempotency_key}' IS NULL AND NOT p_again
    THEN
        id := coalesce((p_jobs #>> '{0,id}')::uuid, new_job_id());
        is_new := enqueue_alone(id, p_jobs -> 0);
        RETURN NEXT;
        RETURN;
    END IF;

    -- Ids first: they name the jobs in every statement below. Clients send theirs.
    v_asked := ARRAY (SELECT (j ->> 'id')::uuid FROM jsonb_array_elements(p_jobs) AS j);
    IF array_position(v_asked, NULL) IS NOT NULL THEN
        v_asked := ARRAY (
            SELECT coalesce(a.id, new_job_id())
            FROM unnest(v_asked) WITH ORDINALITY AS a (id, n)
            ORDER BY a.n);
    END IF;
    v_ids := v_asked;

    IF jsonb_path_exists(p_jobs, '$[*].idempotency_key ? (@ != null)') THEN
        v_owners := (
            SELECT take_idempotency_keys(array_agg(k.key), array_agg(k.id), p_idempotency_ttl)
            FROM (SELECT j.value ->> 'idempotency_key' AS key, v_asked[j.n] AS id
                  FROM jsonb_array_elements(p_jobs) WITH ORDINALITY AS j (value, n)) AS k
            WHERE k.key IS NOT NULL);
        SELECT array_agg(coalesce((v_owners ->> (j.value ->> 'idempotency_key'))::uuid, v_asked[j.n])
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
        WHERE v_ids[j.n] = v_asked[j.n]
        ORDER BY j.n),
    inserted AS (
        INSERT INTO live_jobs (
            id, queue, job_type, priority, data, max_attempts, run_at,
            idempotency_key, ordering_key, request_id, traceparent, keep, blockers)
        SELECT v_asked[i.n], coalesce(i.queue, 'default'), i.job_type, coalesce(i.priority, 100),
               coalesce(i.data, '{}'), coalesce(i.max_attempts, 3),
               greatest(coalesce(i.run_at, clock_timestamp() + make_interval(secs => i.delay)),
                        clock_timestamp()),
               i.idempotency_key, i.ordering_key, i.request_id, i.traceparent, i.keep,
               (i.ordering_key IS NOT NULL)::int
        FROM incoming AS i
        ON CONFLICT (id) DO NOTHING
        RETURNING id, queue, job_type, priority, run_at),
    used AS (
        SELECT queue, job_type, priority, extract(epoch FROM min(run_at)) AS due
        FROM inserted
        GROUP BY queue, job_type, priority)
    SELECT (SELECT array_agg(id) FROM inserted),
           (SELECT jsonb_agg(jsonb_build_array(u.queue, u.job_type, u.due, u.priority)) FROM used AS u)
    INTO v_new, v_lanes;

    IF p_again THEN
        -- Not before the insert, which waits for whoever is just ending one of them: what it then finds
        -- room for has ended, and only a snapshot taken after it shows all of those.
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
        SELECT v.id, v.id = v.asked AND (p_again OR coalesce(v.id = ANY (v_new), false))
        FROM unnest(v_ids, v_asked) WITH ORDINALITY AS v (id, asked, n)
        ORDER BY v.n;
    END IF;
END $$;

-- For jobs that were copied into live_jobs in this transaction: makes their lanes,
-- [[queue, job type, priority], …], and wakes workers, as enqueue_jobs does for its own.
CREATE FUNCTION announce_jobs(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM add_lane(l ->> 0, l ->> 1, (l ->> 2)::int) FROM jsonb_array_elements(p_lanes) AS l;
    -- Due from now on: the beginning of the transaction comes before every job in it.
    PERFORM wake_workers(jsonb_agg(
        jsonb_build_array(l -> 0, l -> 1, extract(epoch FROM now()), l -> 2)))
    FROM jsonb_array_elements(p_lanes) AS l;
END $$;

-- Enqueues one job and returns its id: the id of the first one where the idempotency key is taken.
CREATE FUNCTION enqueue_job(
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

-- INSERT INTO jobs enqueues; anything else on the view names the function to call.
CREATE FUNCTION jobs_view_insert() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT
AS $$
BEGIN
    NEW.id := enqueue_job(
        NEW.job_type, coalesce(NEW.data, '{}'), coalesce(NEW.queue, 'default'),
        coalesce(NEW.priority, 100), NEW.run_at, coalesce(NEW.max_attempts, 3),
        NEW.idempotency_key, NEW.ordering_key, NEW.request_id, NEW.traceparent, NEW.keep, NEW.id);
    RETURN NEW;
END $$;

CREATE FUNCTION jobs_view_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT
AS $$
BEGIN
    RAISE EXCEPTION '% on the view "jobs" is not allowed: jobs change through functions only', TG_OP
        USING ERRCODE = 'feature_not_supported',
              HINT = format('Call %1$s.cancel_jobs, %1$s.retry_jobs, %1$s.fail_jobs, '
                            '%1$s.complete_jobs or %1$s.clear_finished.',
                            quote_ident(TG_TABLE_SCHEMA));
END $$;

CREATE TRIGGER jobs_insert INSTEAD OF INSERT ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_insert();
CREATE TRIGGER jobs_refuse INSTEAD OF UPDATE OR DELETE ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_refuse();
