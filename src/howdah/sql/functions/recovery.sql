-- Recover stale jobs: claimed jobs whose lease expired because the worker crashed or lost its connection.
--
-- Owns the removal of leases. Promises: work resumes by itself within the lease + 5 s (P9), a job whose attempts are used
-- up ends as failed (P4), and a job that cannot be recovered does not keep the others (P8). A worker that could not reach
-- the server keeps its jobs if it beats soon after the server is back (decision 0042). requeue_jobs in acknowledge.sql
-- decides between requeueing and ending. Recovery needs no lane.
--
-- Every search goes through the index on expires_at, from a time on: while a transaction elsewhere stays open, the index
-- keeps an entry of every lease that was removed, and a search from the start would read all of them (decision 0005).
--
-- A lease and its jobs are written by one transaction, and a job that has left a lease does not come back to it. So a
-- lease without a visible job that has its id is over, and no other transaction can show one later.

-- Requeues jobs whose lease expired (p_timeout NULL), or that were claimed longer ago than p_timeout; ends
-- those with no attempts left as failed. Returns the number of stale jobs.
CREATE OR REPLACE FUNCTION recover_stale_jobs(p_timeout interval DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_now timestamptz := snapshot_time();
    v_from timestamptz := '-infinity';
    v_step record;
    v_recovered int := 0;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    IF p_timeout IS NOT NULL THEN
        PERFORM validate_duration('p_timeout', p_timeout);
    END IF;
    IF p_limit IS NULL OR p_limit < 1 THEN
        RAISE EXCEPTION 'p_limit is %: it must be at least 1', coalesce(p_limit::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT r.* INTO v_step
        FROM recover_leases(
            p_limit - v_recovered, v_from, CASE WHEN p_timeout IS NULL THEN v_now ELSE 'infinity' END,
            p_is_overdue => overdue_since(v_now) IS NOT NULL, p_timeout => p_timeout) AS r;
        v_recovered := v_recovered + v_step.recovered;
        EXIT WHEN NOT v_step.more OR v_recovered >= p_limit OR v_step.recovered = 0 AND v_step.reached = v_from;
        v_from := v_step.reached;
    END LOOP;
    RETURN v_recovered;
END $$;

-- Whether the next statement sees what other transactions have committed until then. PostgreSQL treats READ UNCOMMITTED
-- as READ COMMITTED.
CREATE OR REPLACE FUNCTION sees_new_commits() RETURNS boolean
LANGUAGE sql STABLE
RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');

-- What a duty answers that needs this and does not have it.
CREATE OR REPLACE FUNCTION needs_new_commits() RETURNS text
LANGUAGE sql STABLE
RETURN 'it needs a READ COMMITTED transaction: see default_transaction_isolation of the role and the database';

-- A time that is not later than the snapshot of the next statement.
CREATE OR REPLACE FUNCTION snapshot_time() RETURNS timestamptz
LANGUAGE sql VOLATILE
RETURN CASE WHEN sees_new_commits() THEN clock_timestamp()
            ELSE transaction_timestamp() END;

-- Handles leases that expired from p_from until p_until, and those of p_also that did: removes those whose jobs have
-- ended, and excuses the others or recovers their jobs. A lease with a job that is locked is tried again a second later.
-- With p_timeout, instead, those that were claimed longer ago than that; none of them is excused. A call recovers up to
-- p_limit jobs, of leases that had as many, or of one. more: there may be others. reached: when the last of these leases
-- expired.
--
-- p_until must not be later than the snapshot, which shows every heartbeat until it was taken; a later one finds the lease
-- locked here. p_also: leases that another transaction had locked when they expired.
--
-- A worker may have had no chance to send a heartbeat: the recovery is overdue, or the lease was locked. If it is
-- registered, its lease is excused once: it gets three seconds more, and all workers are asked for a heartbeat. A worker
-- that lives extends its lease, and then it may be excused again (decision 0042). A lease that was locked is excused each
-- time: an open transaction that has excused it may keep the heartbeat from it.
CREATE OR REPLACE FUNCTION recover_leases(
    p_limit int,
    p_from timestamptz,
    p_until timestamptz,
    p_also uuid[] DEFAULT '{}',
    p_is_overdue boolean DEFAULT false,
    p_timeout interval DEFAULT NULL,
    OUT recovered int, OUT reached timestamptz, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_leases uuid[] := lock_leases(p_limit, p_from, p_until, p_also, p_timeout);
    v_found int := cardinality(v_leases);
    v_ids uuid[];
    v_fences uuid[];
    v_excused uuid[];
    v_stale uuid[];
    v_locked uuid[];
BEGIN
    recovered := 0;
    more := false;
    IF v_found = 0 THEN
        RETURN;
    END IF;
    SELECT array_agg(l.lease_id), max(l.expires_at) INTO v_leases, reached
    FROM (SELECT b.lease_id, b.expires_at, sum(b.jobs) OVER (ORDER BY b.at, b.lease_id) - b.jobs AS before
          -- An expression, so that the order is not that of the index of times, which may be full of dead entries.
          FROM (SELECT t.lease_id, t.expires_at, t.expires_at + interval '0' AS at, cardinality(t.job_ids) AS jobs
                FROM leases AS t
                WHERE t.lease_id = ANY (v_leases)) AS b) AS l
    WHERE l.before < p_limit;
    more := v_found >= p_limit OR cardinality(v_leases) < v_found;
    SELECT array_agg(u.id), array_agg(u.lease_id) INTO v_ids, v_fences
    FROM (SELECT unnest(l.job_ids) AS id, l.lease_id FROM leases AS l WHERE l.lease_id = ANY (v_leases)) AS u;
    SELECT array_agg(h.id), array_agg(h.lease_id) INTO v_ids, v_fences FROM held_jobs(v_ids, v_fences) AS h;

    IF v_ids IS NOT NULL AND p_timeout IS NULL THEN
        v_excused := excuse_leases(
            ARRAY (SELECT DISTINCT f FROM unnest(v_fences) AS f WHERE p_is_overdue),
            ARRAY (SELECT DISTINCT f FROM unnest(v_fences) AS f WHERE f = ANY (p_also)));
        SELECT array_agg(h.id), array_agg(h.lease_id) INTO v_ids, v_fences
        FROM unnest(v_ids, v_fences) AS h (id, lease_id)
        WHERE h.lease_id <> ALL (v_excused);
    END IF;
    IF v_ids IS NOT NULL THEN
        v_stale := ARRAY (
            SELECT j.id
            FROM live_jobs AS j
            WHERE j.id = ANY (v_ids)
              AND (j.id, j.lease_id) IN (SELECT h.id, h.lease_id FROM unnest(v_ids, v_fences) AS h (id, lease_id))
            LIMIT p_limit
            FOR UPDATE OF j SKIP LOCKED);
        recovered := cardinality(v_stale);
        problem := recover_jobs(v_stale);
        SELECT array_agg(h.id), array_agg(h.lease_id) INTO v_ids, v_fences FROM held_jobs(v_ids, v_fences) AS h;
        IF recovered = p_limit AND NOT v_stale <@ v_ids THEN
            more := true;  -- the same leases may have more
        ELSE
            -- Those with a locked job; then the others, whose jobs cannot be recovered.
            v_locked := ARRAY (
                SELECT DISTINCT h.lease_id FROM unnest(v_ids, v_fences) AS h (id, lease_id)
                WHERE problem IS NULL OR h.id <> ALL (v_stale));
            PERFORM postpone_leases(v_locked, interval '1 second');
            PERFORM postpone_leases(ARRAY (SELECT unnest(v_fences) EXCEPT SELECT unnest(v_locked)), interval '1 minute');
        END IF;
    END IF;
    DELETE FROM leases AS l
    WHERE l.lease_id = ANY (ARRAY (
        SELECT o FROM unnest(v_leases) AS o EXCEPT SELECT unnest(v_fences) EXCEPT SELECT unnest(v_excused)));
END $$;

-- Lets recovery handle expired leases again after a while: their jobs are locked, or cannot be recovered.
CREATE OR REPLACE FUNCTION postpone_leases(p_lease_ids uuid[], p_delay interval) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    UPDATE leases AS l
    SET written_at = clock_timestamp(), expires_at = clock_timestamp() + p_delay
    WHERE l.lease_id = ANY (p_lease_ids) AND l.expires_at <= clock_timestamp()
$$;

-- Locks leases for recover_leases. The times are parameters because an index cannot be searched by a volatile clock.
CREATE OR REPLACE FUNCTION lock_leases(
    p_limit int, p_from timestamptz, p_until timestamptz, p_also uuid[], p_timeout interval)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN
    ARRAY (
        SELECT l.lease_id
        FROM leases AS l
        -- In a CASE, so that it cannot be searched for in the index of times, which may be full of dead entries.
        WHERE l.lease_id = ANY (p_also) AND CASE WHEN p_timeout IS NULL THEN l.expires_at <= p_until END
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED)
    || ARRAY (
        SELECT l.lease_id
        FROM leases AS l
        WHERE l.expires_at BETWEEN p_from AND p_until
          AND (p_timeout IS NULL OR l.claimed_at <= clock_timestamp() - p_timeout)
          AND l.lease_id <> ALL (p_also)
        ORDER BY l.expires_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED);
END $$;

-- Excuses leases that the caller has locked, if a registered worker holds them and they were not excused since its last
-- heartbeat; those of p_locked also if they were: their lock kept the heartbeats from them. Returns those that were excused
-- now. A bare loop is not registered, and sends no heartbeats.
CREATE OR REPLACE FUNCTION excuse_leases(p_lease_ids uuid[], p_locked uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_excused uuid[];
BEGIN
    WITH excused AS (
        UPDATE leases AS l
        SET written_at = v_now, expires_at = v_now + interval '3 seconds', is_excused = true
        WHERE l.lease_id = ANY (p_lease_ids || p_locked)
          AND (NOT l.is_excused OR l.lease_id = ANY (p_locked))
          AND l.worker_id IN (SELECT w.worker_id FROM workers AS w)
        RETURNING l.lease_id)
    SELECT array_agg(e.lease_id) INTO v_excused FROM excused AS e;
    IF v_excused IS NOT NULL THEN
        PERFORM ask_for_heartbeats();
    END IF;
    RETURN coalesce(v_excused, '{}');
END $$;

-- Asks all workers for a heartbeat now.
CREATE OR REPLACE FUNCTION ask_for_heartbeats() RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    SELECT pg_notify(current_schema() || ':cancel', '[]')
$$;

-- Recovers jobs that the caller has locked. If that fails, each half is tried by itself, down to the job
-- that cannot be recovered: it is named in the answer. NULL: all were recovered.
CREATE OR REPLACE FUNCTION recover_jobs(p_ids uuid[]) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_half int := cardinality(p_ids) / 2;
    v_error text;
BEGIN
    IF p_ids = '{}' THEN
        RETURN NULL;
    END IF;
    BEGIN
        PERFORM requeue_jobs(
            p_ids, 'recover', 'the lease expired; the worker stopped or lost its connection');
        RETURN NULL;
    EXCEPTION WHEN OTHERS THEN
        v_error := format('job %s could not be recovered: %s', p_ids[1], SQLERRM);
    END;
    IF v_half > 0 THEN
        v_error := recover_jobs(p_ids[:v_half]);
        RETURN coalesce(recover_jobs(p_ids[v_half + 1:]), v_error);
    END IF;
    RAISE WARNING '%', v_error;
    BEGIN
        UPDATE live_jobs AS j SET last_error = v_error WHERE j.id = ANY (p_ids);
    EXCEPTION WHEN OTHERS THEN
        NULL;  -- the row cannot be changed at all
    END;
    RETURN v_error;
END $$;

-- Since when the duty `recover` is overdue; NULL if it is not. It is if its last complete run is longer ago than two to
-- four seconds and two more: the server was away or unreachable, its clock has stepped forward, the run failed, or no
-- process that runs duties was there. Workers may have had no chance to send heartbeats meanwhile. Leases that such a step
-- has shortened may expire later than the run that found itself overdue, so the next ten seconds count as overdue, too. A
-- run reaches a quarter of a second less than its start.
CREATE OR REPLACE FUNCTION overdue_since(p_now timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
RETURN (
    SELECT CASE WHEN m.reached < p_now - interval '6 seconds' THEN p_now
                WHEN (m.state ->> 'overdue_at')::timestamptz BETWEEN p_now - interval '10 seconds' AND p_now
                THEN (m.state ->> 'overdue_at')::timestamptz END
    FROM maintenance AS m
    WHERE m.duty = 'recover' AND isfinite(m.due_at));

-- When the first lease between these times expired. The other searches start there: in most runs none has expired, and
-- then the dead entries of the index are read once.
CREATE OR REPLACE FUNCTION first_expired(p_from timestamptz, p_until timestamptz) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN (
    SELECT l.expires_at
    FROM leases AS l
    WHERE l.expires_at BETWEEN p_from AND p_until
    ORDER BY l.expires_at
    LIMIT 1);
END $$;

-- The duty `recover`. It starts where the previous run ended: leases are set to expire in the future, so that run
-- handled what had expired by then. It keeps the ids of expired leases that were locked, and tries them again by id.
-- Leases that were committed after they expired are left to recover_late.
CREATE OR REPLACE FUNCTION recover_expired(
    p_limit int DEFAULT 1000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_started timestamptz := snapshot_time();
    v_overdue timestamptz := overdue_since(v_started);
    v_from timestamptz;
    v_locked uuid[];
    v_first timestamptz;
    v_state jsonb := jsonb_strip_nulls(jsonb_build_object('overdue_at', v_overdue));
BEGIN
    SELECT CASE WHEN m.reached <= v_started THEN m.reached ELSE '-infinity' END,  -- the clock went back
           ARRAY (SELECT e::uuid FROM jsonb_array_elements_text(m.state -> 'locked') AS e)
    INTO v_from, v_locked
    FROM maintenance AS m
    WHERE m.duty = 'recover';
    more := false;
    IF v_overdue = v_started THEN
        PERFORM ask_for_heartbeats();  -- a lease that has not expired yet may do so before the next one
    END IF;
    v_first := first_expired(v_from, v_started);
    IF v_first IS NULL AND v_locked = '{}' THEN
        PERFORM remember('recover', v_started - head_margin(), v_state);
        RETURN;
    END IF;
    SELECT r.more, r.problem INTO more, problem
    FROM recover_leases(p_limit, v_first, v_started, v_locked, v_overdue IS NOT NULL) AS r;
    IF more THEN
        RETURN;
    END IF;
    v_locked := ARRAY (
        SELECT l.lease_id FROM leases AS l
        WHERE l.lease_id = ANY (v_locked) AND CASE WHEN v_started IS NOT NULL THEN l.expires_at <= v_started END)
    || ARRAY (
        SELECT l.lease_id FROM leases AS l
        WHERE l.expires_at BETWEEN v_first AND v_started AND l.lease_id <> ALL (v_locked)
        ORDER BY l.expires_at
        LIMIT 1001);
    -- If there are too many to keep, the next run starts where this one did.
    PERFORM remember('recover',
                     CASE WHEN cardinality(v_locked) > 1000 THEN v_from ELSE v_started - head_margin() END,
                     v_state || jsonb_build_object('locked', v_locked[:1000]));
END $$;

-- The duty `late`: searches again for leases that `recover` cannot have seen, because their transaction
-- committed after they had expired. It notes the transactions that have written jobs and are open, and since when:
-- none of them can have set a lease before the run that preceded its first note. When one of them has ended, the next
-- run searches from there. So each entry of the index is read once, and once more for each transaction that was open
-- for longer than the time between two runs. No transaction that stays open keeps the leases of the others.
CREATE OR REPLACE FUNCTION recover_late(p_limit int DEFAULT 1000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_started timestamptz := clock_timestamp();
    v_since timestamptz;
    v_noted jsonb;
    v_open text[];
    v_from timestamptz;
    v_first timestamptz;
BEGIN
    more := false;
    IF NOT sees_new_commits() THEN
        problem := needs_new_commits();
        RETURN;
    END IF;
    SELECT coalesce((m.state ->> 'since')::timestamptz, '-infinity'), coalesce(m.state -> 'writers', '{}')
    INTO v_since, v_noted
    FROM maintenance AS m
    WHERE m.duty = 'late';
    IF v_since > v_started THEN  -- the clock went back
        v_since := '-infinity';
    END IF;
    v_open := writers_of_jobs();
    v_from := least(v_since, (
        SELECT min(w.value::timestamptz) FROM jsonb_each_text(v_noted) AS w WHERE w.key <> ALL (v_open)));
    v_first := first_expired(v_from, v_started);
    IF v_first IS NOT NULL THEN
        SELECT r.more, r.problem INTO more, problem
        FROM recover_leases(p_limit, v_first, v_started,
                            p_is_overdue => overdue_since(v_started) IS NOT NULL) AS r;
        IF more THEN
            RETURN;
        END IF;
        v_first := first_expired(v_first, v_started);
    END IF;
    PERFORM remember('late', v_from, jsonb_build_object(
        -- Leases that were locked are searched for again.
        'since', least(v_started - head_margin(), v_first),
        'writers', (
            SELECT coalesce(jsonb_object_agg(o.writer, coalesce(
                v_noted -> o.writer,
                -- It may be noted under another name: see writers_of_jobs.
                CASE WHEN o.writer LIKE 'prepared %' THEN (
                    SELECT to_jsonb(min(w.value::timestamptz)) FROM jsonb_each_text(v_noted) AS w) END,
                to_jsonb(v_since))), '{}')
            FROM unnest(v_open) AS o (writer))));
END $$;
