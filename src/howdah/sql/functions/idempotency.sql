-- Idempotency keys: two enqueues of one job type with one key make one job.
--
-- Owns the tables idempotency_keys and freed_keys (decision 0033). A key is taken by an enqueue, kept for its
-- lifetime by a job that completes, and freed by a job that ends as failed or cancelled or is removed.
--
-- Promises: an enqueue waits only for a transaction that takes the same key. So the row of a key is locked only by
-- transactions that take it, and for a moment by `prune`. A transaction that frees a key adds a row to freed_keys:
-- if it changed the row of the key, an enqueue that replaces the key after its lifetime would wait for it.

-- Keys that expired before this time are free. A clock that jumps ahead for some seconds must not free the keys of
-- weeks: if it is more than an hour ahead of the last confirmed reading, that reading counts. So without
-- maintenance for more than an hour, keys stay taken.
CREATE OR REPLACE FUNCTION keys_expired_before() RETURNS timestamptz
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    SELECT CASE WHEN isfinite(m.reached) AND m.reached < c.now - interval '1 hour'
                THEN m.reached ELSE c.now END
    FROM (SELECT clock_timestamp() AS now) AS c
    LEFT JOIN maintenance AS m ON m.duty = 'prune'
$$;

-- Takes the idempotency keys of a batch, given as arrays of one length, and returns the job that owns each key.
-- A NULL key takes nothing: its owner is the given id. A key that a job with other data owns is an error.
--
-- Only missing, expired and freed keys are written. A key that is merely read stays unlocked. The statements are
-- separate because each needs a new snapshot: a concurrent transaction may commit the key in between, and then the
-- next round reads it. One reading of the clock decides what has expired, and what is taken here expires after it:
-- whatever the clock does meanwhile, the next round finds what this one took.
CREATE OR REPLACE FUNCTION take_idempotency_keys(
    p_job_types text[], p_keys text[], p_ids uuid[], p_data_hashes bigint[], p_ttls interval[])
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_owners uuid[] := ARRAY (
        SELECT CASE WHEN a.key IS NULL THEN a.id END
        FROM unnest(p_keys, p_ids) WITH ORDINALITY AS a (key, id, n)
        ORDER BY a.n);
    v_hashes bigint[] := p_data_hashes;
    v_round int := 0;
    v_expired_before timestamptz := v_now;
BEGIN
    PERFORM require_key_lifetimes(p_keys, p_ttls);
    LOOP
        -- LIMIT, so that each key is one search in the index: the planner would join the whole of a small table.
        SELECT array_agg(coalesce(v_owners[a.n], k.job_id) ORDER BY a.n),
               array_agg(coalesce(k.data_hash, v_hashes[a.n]) ORDER BY a.n)
        INTO v_owners, v_hashes
        FROM unnest(p_job_types, p_keys) WITH ORDINALITY AS a (job_type, key, n)
        LEFT JOIN LATERAL (
            SELECT i.job_id, i.data_hash
            FROM idempotency_keys AS i
            WHERE i.job_type = a.job_type AND i.key = a.key AND v_owners[a.n] IS NULL
              AND i.expires_at > v_expired_before
              AND NOT EXISTS (SELECT FROM freed_keys AS f WHERE f.holding_id = i.holding_id)
            LIMIT 1) AS k ON true;
        EXIT WHEN array_position(v_owners, NULL) IS NULL;
        v_round := v_round + 1;
        IF v_round > 100 THEN
            RAISE EXCEPTION 'idempotency keys could not be taken: other transactions take and free them all the time'
                USING ERRCODE = 'serialization_failure', HINT = 'Enqueue again.';
        END IF;
        IF v_round > 1 THEN
            v_expired_before := least(v_now, keys_expired_before());
            -- In the order of the keys, so that two batches cannot deadlock.
            PERFORM k.key
            FROM unnest(p_job_types, p_keys) WITH ORDINALITY AS a (job_type, key, n)
            JOIN idempotency_keys AS k ON k.job_type = a.job_type AND k.key = a.key
            WHERE v_owners[a.n] IS NULL
              AND (k.expires_at <= v_expired_before
                   OR EXISTS (SELECT FROM freed_keys AS f WHERE f.holding_id = k.holding_id))
            ORDER BY k.job_type, k.key
            FOR UPDATE OF k;
            UPDATE idempotency_keys AS k
            SET job_id = a.id, data_hash = a.data_hash, holding_id = gen_random_uuid(),
                expires_at = greatest(v_now + a.ttl, v_now + interval '1 microsecond')
            FROM (SELECT DISTINCT ON (u.job_type, u.key) u.*
                  FROM unnest(p_job_types, p_keys, p_ids, p_data_hashes, p_ttls) WITH ORDINALITY
                      AS u (job_type, key, id, data_hash, ttl, n)
                  WHERE v_owners[u.n] IS NULL
                  ORDER BY u.job_type, u.key, u.n) AS a
            WHERE k.job_type = a.job_type AND k.key = a.key
              AND (k.expires_at <= v_expired_before
                   OR EXISTS (SELECT FROM freed_keys AS f WHERE f.holding_id = k.holding_id));
        END IF;
        INSERT INTO idempotency_keys (job_type, key, job_id, data_hash, expires_at)
        SELECT DISTINCT ON (a.job_type, a.key)
               a.job_type, a.key, a.id, a.data_hash, greatest(v_now + a.ttl, v_now + interval '1 microsecond')
        FROM unnest(p_job_types, p_keys, p_ids, p_data_hashes, p_ttls) WITH ORDINALITY
            AS a (job_type, key, id, data_hash, ttl, n)
        WHERE v_owners[a.n] IS NULL
        ORDER BY a.job_type, a.key, a.n
        ON CONFLICT (job_type, key) DO NOTHING;
    END LOOP;
    PERFORM refuse_other_data(p_job_types, p_keys, p_ids, p_data_hashes, v_owners, v_hashes);
    RETURN v_owners;
END $$;

-- Refuses lifetimes of keys that are negative, infinite or NULL.
CREATE OR REPLACE FUNCTION require_key_lifetimes(p_keys text[], p_ttls interval[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_refused record;
BEGIN
    SELECT a.key, a.ttl INTO v_refused
    FROM unnest(p_keys, p_ttls) AS a (key, ttl)
    WHERE a.key IS NOT NULL AND (a.ttl BETWEEN interval '0' AND interval '1000 years') IS NOT TRUE
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the lifetime of the idempotency key "%" is %; it must be from 0 to 1000 years',
                        v_refused.key, coalesce(v_refused.ttl::text, 'NULL')
            USING ERRCODE = 'check_violation', SCHEMA = current_schema(), TABLE = 'idempotency_keys',
                  CONSTRAINT = 'idempotency_ttl_range',
                  HINT = 'Leave out the lifetime for the default of 7 days.';
    END IF;
END $$;

-- Refuses a key whose owner has other data.
CREATE OR REPLACE FUNCTION refuse_other_data(
    p_job_types text[], p_keys text[], p_ids uuid[], p_data_hashes bigint[], p_owners uuid[], p_hashes bigint[])
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_refused int;
BEGIN
    SELECT a.n INTO v_refused
    FROM unnest(p_keys) WITH ORDINALITY AS a (key, n)
    WHERE a.key IS NOT NULL AND p_hashes[a.n] <> p_data_hashes[a.n] AND p_owners[a.n] <> p_ids[a.n]
    ORDER BY a.n
    LIMIT 1;
    IF v_refused IS NOT NULL THEN
        RAISE EXCEPTION 'the idempotency key "%" of job type "%" belongs to job %, which has other data',
                        p_keys[v_refused], p_job_types[v_refused], p_owners[v_refused]
            USING ERRCODE = 'unique_violation',
                  SCHEMA = current_schema(), TABLE = 'idempotency_keys', CONSTRAINT = 'idempotency_keys_pkey',
                  DETAIL = format('First job: %s. Refused job: %s.', p_owners[v_refused], p_ids[v_refused]),
                  HINT = 'Enqueue the same data again, or use another key for other data.';
    END IF;
END $$;

-- Frees the keys of jobs that ended as failed or cancelled, or were removed. Locks and waits for nothing.
CREATE OR REPLACE FUNCTION free_idempotency_keys(p_ids uuid[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET jit = off
AS $$
    INSERT INTO freed_keys (holding_id, job_id)
    SELECT k.holding_id, k.job_id FROM idempotency_keys AS k WHERE k.job_id = ANY (p_ids)
$$;

-- Removes keys that were freed, and the rows of freed_keys whose key is gone or was taken again. Returns the larger
-- of the two numbers. Two statements: the second sees what the first one removed. Keys are searched by the job of a row of
-- freed_keys: the other way round reads all keys, also those that a transaction which stays open keeps.
CREATE OR REPLACE FUNCTION remove_freed_keys(p_limit int) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_jobs uuid[] := ARRAY (SELECT f.job_id FROM freed_keys AS f LIMIT p_limit);
    v_keys bigint;
    v_freed bigint;
BEGIN
    IF v_jobs = '{}' THEN
        RETURN 0;
    END IF;
    DELETE FROM idempotency_keys
    WHERE ctid = ANY (ARRAY (
        SELECT k.ctid
        FROM idempotency_keys AS k
        WHERE k.job_id = ANY (v_jobs)
          AND EXISTS (SELECT FROM freed_keys AS f WHERE f.holding_id = k.holding_id)
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_keys = ROW_COUNT;
    DELETE FROM freed_keys
    WHERE ctid = ANY (ARRAY (
        SELECT f.ctid FROM freed_keys AS f
        WHERE NOT EXISTS (
            SELECT FROM idempotency_keys AS k
            WHERE k.job_id = f.job_id AND k.holding_id = f.holding_id
            OFFSET 0)
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_freed = ROW_COUNT;
    RETURN greatest(v_keys, v_freed);
END $$;
