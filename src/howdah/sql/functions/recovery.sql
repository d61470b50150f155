-- Recover stale jobs: claimed jobs whose lease expired because the worker crashed or lost its connection.
--
-- Promises: work resumes by itself within the lease + 5 s (P9), a job whose attempts are used up ends as
-- failed (P4), and a job that cannot be recovered does not keep the others (P8). A worker that could not reach the server
-- keeps its jobs if it beats soon after the server is back (decision 0042). requeue_jobs in
-- acknowledge.sql decides between requeueing and ending. Recovery needs no lane.
--
-- Every search goes through the index on lease_expires_at, from a time on: while a transaction elsewhere
-- stays open, the index keeps an entry of every lease that ended, and a search from the start would read
-- all of them (decision 0005). Functions that search by id have generic plans: a plan for an empty array of ids may use any
-- partial index, since a condition that is never true implies the condition of each index. Such a search also has its
-- condition on the lease in a CASE, so that it cannot use the index of leases.

-- Requeues jobs whose lease expired (p_timeout NULL), or that were claimed longer ago than p_timeout; ends
-- those with no attempts left as failed. Returns the number of stale jobs.
CREATE OR REPLACE FUNCTION recover_stale_jobs(p_timeout interval DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_now timestamptz := snapshot_time();
    v_stale uuid[];
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
    IF p_timeout IS NULL THEN
        PERFORM excuse_missed_heartbeats('-infinity', v_now, '{}');
    END IF;
    v_stale := lock_stale_jobs(
        p_timeout, p_limit, '-infinity', CASE WHEN p_timeout IS NOT NULL THEN 'infinity' ELSE v_now END);
    PERFORM recover_jobs(v_stale);
    RETURN cardinality(v_stale);
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

-- Locks stale jobs whose lease expires between p_from and p_until, and those of p_also that are stale.
-- The times are parameters because an index cannot be searched by a volatile clock: the scan would visit
-- every job in flight. The plan is the generic one: after autovacuum has analyzed a drained queue, a plan for
-- given times would read the whole primary key.
--
-- A job whose heartbeats met a lock is not stale (decision 0004). p_until must not be later than the snapshot, which
-- shows heartbeats that were written until it was taken. One that was written seconds after p_until is that of a clock
-- that was ahead.
CREATE OR REPLACE FUNCTION lock_stale_jobs(
    p_timeout interval, p_limit int, p_from timestamptz, p_until timestamptz, p_also uuid[] DEFAULT '{}')
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN
    ARRAY (
        SELECT j.id
        FROM live_jobs AS j
        WHERE j.id = ANY (p_also) AND CASE WHEN j.status = 'claimed' THEN j.lease_expires_at <= p_until END
          AND NOT EXISTS (
              SELECT FROM extended_leases AS e
              WHERE e.job_id = j.id AND e.lease_id = j.lease_id
                AND e.written_at <= p_until + interval '5 seconds' AND e.expires_at > p_until)
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED)
    || ARRAY (
        SELECT j.id
        FROM live_jobs AS j
        WHERE j.status = 'claimed'
          AND j.lease_expires_at BETWEEN p_from AND p_until
          AND (p_timeout IS NULL OR j.claimed_at <= clock_timestamp() - p_timeout)
          AND j.id <> ALL (p_also)
          AND NOT EXISTS (
              SELECT FROM extended_leases AS e
              WHERE e.job_id = j.id AND e.lease_id = j.lease_id
                AND e.written_at <= p_until + interval '5 seconds' AND e.expires_at > p_until)
        ORDER BY j.lease_expires_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED);
END $$;

-- Recovers jobs that the caller has locked. If that fails, each half is tried by itself, down to the job
-- that cannot be recovered: it is left for a minute and named in the answer. NULL: all were recovered.
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
        UPDATE live_jobs AS j
        SET lease_expires_at = clock_timestamp() + interval '1 minute', last_error = v_error
        WHERE j.id = ANY (p_ids);
    EXCEPTION WHEN OTHERS THEN
        NULL;  -- the row cannot be changed at all: the duty tries it again in its next run
    END;
    RETURN v_error;
END $$;

-- Whether the last complete run of the duty `recover` is longer ago than two to four seconds and two more: the server was
-- away or unreachable, its clock has stepped forward, the run failed, or no process that runs duties was there. Workers may
-- have had no chance to send heartbeats meanwhile. Leases that such a step has shortened may expire later than the run that
-- found itself overdue, so the next ten seconds count as overdue, too. A run reaches a quarter of a second less than its start.
CREATE OR REPLACE FUNCTION is_recovery_overdue(p_now timestamptz) RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT
RETURN EXISTS (
    SELECT FROM maintenance AS m
    WHERE m.duty = 'recover' AND isfinite(m.due_at)
      AND (m.reached < p_now - interval '6 seconds'
           OR (m.state ->> 'overdue_at')::timestamptz BETWEEN p_now - interval '10 seconds' AND p_now));

-- If the recovery is overdue, adds a heartbeat of three seconds beside each job whose lease expired between p_from and
-- p_now, and beside those of p_also, if a registered worker holds it, and asks all workers for a heartbeat of their own: a
-- lease that has not expired yet may do so before the next one. A lease is excused once: a worker that lives extends it, and
-- then it may be excused again after the next outage (decision 0042). Several runs at once may excuse the same jobs, so it
-- waits for nobody and locks no job. Returns when the recovery was found overdue, for `remember`.
CREATE OR REPLACE FUNCTION excuse_missed_heartbeats(p_from timestamptz, p_now timestamptz, p_also uuid[])
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_expired uuid[];
    v_overdue_at timestamptz;
BEGIN
    IF NOT is_recovery_overdue(p_now) THEN
        RETURN NULL;
    END IF;
    v_expired := p_also || ARRAY (
        SELECT j.id
        FROM live_jobs AS j
        WHERE j.status = 'claimed' AND j.lease_expires_at BETWEEN p_from AND p_now AND j.id <> ALL (p_also)
        ORDER BY j.lease_expires_at);
    INSERT INTO extended_leases (lease_id, job_id, written_at, expires_at, is_excuse)
    SELECT j.lease_id, j.id, p_now, p_now + interval '3 seconds', true
    FROM live_jobs AS j
    WHERE j.id = ANY (v_expired) AND CASE WHEN j.status = 'claimed' THEN j.lease_expires_at <= p_now END
      AND EXISTS (SELECT FROM workers AS w WHERE w.worker_id = j.worker_id)
      AND NOT EXISTS (
          SELECT FROM extended_leases AS e
          WHERE e.job_id = j.id AND e.lease_id = j.lease_id AND e.is_excuse
            AND e.written_at >= j.lease_expires_at
            AND NOT EXISTS (
                SELECT FROM extended_leases AS beat
                WHERE beat.job_id = j.id AND beat.lease_id = j.lease_id AND NOT beat.is_excuse
                  AND beat.written_at > e.written_at));
    v_overdue_at := (
        SELECT CASE WHEN m.reached < p_now - interval '6 seconds' THEN p_now
                    ELSE (m.state ->> 'overdue_at')::timestamptz END
        FROM maintenance AS m
        WHERE m.duty = 'recover');
    IF v_overdue_at = p_now THEN
        PERFORM pg_notify(current_schema() || ':cancel', '[]');
    END IF;
    RETURN v_overdue_at;
END $$;

-- When the first lease between these times expired. The other searches start there: in most runs none has expired, and
-- then the dead entries of the index are read once.
CREATE OR REPLACE FUNCTION first_expired(p_from timestamptz, p_until timestamptz) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN (
    SELECT j.lease_expires_at
    FROM live_jobs AS j
    WHERE j.status = 'claimed' AND j.lease_expires_at BETWEEN p_from AND p_until
    ORDER BY j.lease_expires_at
    LIMIT 1);
END $$;

-- The duty `recover`. It starts where the previous run ended: leases are set to expire in the future, so
-- that run handled what had expired by then. It keeps the ids of expired jobs that were locked or excused, and tries
-- them again by id. Leases that were committed after they expired are left to recover_late.
CREATE OR REPLACE FUNCTION recover_expired(
    p_limit int DEFAULT 1000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_started timestamptz := snapshot_time();
    v_from timestamptz;
    v_locked uuid[];
    v_stale uuid[];
    v_first timestamptz;
    v_state jsonb;
BEGIN
    SELECT CASE WHEN m.reached <= v_started THEN m.reached ELSE '-infinity' END,  -- the clock went back
           ARRAY (SELECT e::uuid FROM jsonb_array_elements_text(m.state -> 'locked') AS e)
    INTO v_from, v_locked
    FROM maintenance AS m
    WHERE m.duty = 'recover';
    more := false;
    v_first := first_expired(v_from, v_started);
    v_state := jsonb_strip_nulls(jsonb_build_object(
        'overdue_at', excuse_missed_heartbeats(v_first, v_started, v_locked)));
    IF v_first IS NULL AND v_locked = '{}' THEN
        PERFORM remember('recover', v_started - head_margin(), v_state);
        RETURN;
    END IF;
    v_stale := lock_stale_jobs(NULL, p_limit, v_first, v_started, v_locked);
    problem := recover_jobs(v_stale);
    more := cardinality(v_stale) >= p_limit;
    IF more THEN
        RETURN;
    END IF;
    v_locked := ARRAY (
        SELECT j.id FROM live_jobs AS j
        WHERE j.id = ANY (v_locked) AND CASE WHEN j.status = 'claimed' THEN j.lease_expires_at <= v_started END)
    || ARRAY (
        SELECT j.id FROM live_jobs AS j
        WHERE j.status = 'claimed' AND j.lease_expires_at BETWEEN v_first AND v_started
          AND j.id <> ALL (v_locked)
        ORDER BY j.lease_expires_at
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
    v_stale uuid[];
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
        PERFORM excuse_missed_heartbeats(v_first, v_started, '{}');
        v_stale := lock_stale_jobs(NULL, p_limit, v_first, v_started);
        problem := recover_jobs(v_stale);
        more := cardinality(v_stale) >= p_limit;
        IF more THEN
            RETURN;
        END IF;
        v_first := first_expired(v_first, v_started);
    END IF;
    PERFORM remember('late', v_from, jsonb_build_object(
        -- Jobs that were locked are searched for again.
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
