-- Extend leases. A lease is a row of the table leases, one for the jobs of a lane that were claimed at once.
--
-- Owns the expiry of leases, and the removal of those whose jobs have ended. claim.sql adds leases; recovery.sql takes the
-- jobs of those that expired, and removes what is left. Promises: a heartbeat waits for no other transaction, and no lock on a job keeps
-- it from extending the lease (decision 0045). A stale fence extends nothing (P3).
--
-- The joins follow the rule in acknowledge.sql.

-- A job whose lease never ends is never recovered.
CREATE OR REPLACE FUNCTION validate_lease(p_lease interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_lease IS NULL OR p_lease <= interval '0' OR p_lease > interval '30 days' THEN
        RAISE EXCEPTION 'p_lease is %: it must be positive and at most 30 days', coalesce(p_lease::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Extends leases to now + p_lease, including an expired lease that was not recovered yet. Returns those that were
-- extended; one that another transaction has locked is not among them.
CREATE OR REPLACE FUNCTION extend_leases(p_lease_ids uuid[], p_lease interval) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_extended uuid[];
BEGIN
    -- The time is read when the statement has its locks: it may wait for that of the table.
    WITH extended AS (
        UPDATE leases AS l
        SET written_at = clock_timestamp(), expires_at = clock_timestamp() + p_lease, is_excused = false
        WHERE l.lease_id = ANY (ARRAY (
            SELECT e.lease_id FROM leases AS e
            WHERE e.lease_id = ANY (p_lease_ids)
            FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING l.lease_id)
    SELECT array_agg(e.lease_id) INTO v_extended FROM extended AS e;
    RETURN coalesce(v_extended, '{}');
END $$;

-- Extends the leases of jobs, and those of p_more_leases, whose jobs the caller does not ask about one by one: those
-- that a worker has not started, or is acknowledging. All jobs that were claimed with a job share its lease.
--
-- Returns for each id whether its lease was extended, whether the job is still the caller's (`mine`), and whether its
-- cancellation was requested: a lease that another transaction has locked is not extended, and not lost. For each of
-- p_more_leases the id is NULL, and `mine` says whether the lease exists. p_elapsed: seconds since the job started, NULL
-- if it did not. Its start is recorded unless another transaction has locked the job: then a later heartbeat records it.
-- p_ended_leases: leases to remove unless one of their jobs is still claimed.
CREATE OR REPLACE FUNCTION extend_jobs(
    p_ids uuid[],
    p_lease_ids uuid[],
    p_lease interval DEFAULT '30 seconds',
    p_elapsed float8[] DEFAULT NULL,
    p_more_leases uuid[] DEFAULT '{}',
    p_ended_leases uuid[] DEFAULT '{}')
RETURNS TABLE (id uuid, extended boolean, mine boolean, cancel_requested boolean, lease_id uuid)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path FROM CURRENT SET jit = off
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_held uuid[];
    v_unrecorded boolean;
    v_extended uuid[];
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    PERFORM validate_lease(p_lease);
    SELECT array_agg(DISTINCT j.lease_id), bool_or(j.started_at IS NULL AND a.elapsed IS NOT NULL)
    INTO v_held, v_unrecorded
    FROM unnest(p_ids, p_lease_ids, p_elapsed) AS a (id, lease_id, elapsed)
    JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
    WHERE j.id = ANY (p_ids);
    v_extended := extend_leases(v_held || p_more_leases, p_lease);
    IF v_unrecorded THEN
        WITH locked AS MATERIALIZED (
            SELECT j.id, a.elapsed
            FROM unnest(p_ids, p_lease_ids, p_elapsed) AS a (id, lease_id, elapsed)
            JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id
            WHERE j.id = ANY (p_ids) AND j.started_at IS NULL AND a.elapsed IS NOT NULL
            FOR NO KEY UPDATE OF j SKIP LOCKED)
        UPDATE live_jobs AS j
        SET started_at = greatest(j.claimed_at, v_now - elapsed_time(l.elapsed))
        FROM locked AS l
        WHERE j.id = l.id AND j.id = ANY (p_ids);
    END IF;
    RETURN QUERY
    SELECT a.id,
           j.id IS NOT NULL AND e.lease_id IS NOT NULL,
           j.id IS NOT NULL,
           coalesce(j.cancel_requested, false),
           a.lease_id
    FROM unnest(p_ids, p_lease_ids) AS a (id, lease_id)
    LEFT JOIN live_jobs AS j ON j.id = a.id AND j.lease_id = a.lease_id AND j.id = ANY (p_ids)
    LEFT JOIN unnest(v_extended) AS e (lease_id) ON e.lease_id = a.lease_id;
    IF p_more_leases <> '{}' THEN
        RETURN QUERY
        SELECT NULL::uuid, e.lease_id IS NOT NULL, l.lease_id IS NOT NULL, false, a.lease_id
        FROM unnest(p_more_leases) AS a (lease_id)
        LEFT JOIN leases AS l ON l.lease_id = a.lease_id AND l.lease_id = ANY (p_more_leases)
        LEFT JOIN unnest(v_extended) AS e (lease_id) ON e.lease_id = a.lease_id;
    END IF;
    IF p_ended_leases <> '{}' THEN
        PERFORM remove_ended_leases(p_ended_leases);
    END IF;
END $$;

-- Removes leases whose jobs have ended or were taken from them, so that recovery need not. A lease that another
-- transaction has locked is left to recovery. A bare loop acknowledges the jobs of a batch one by one: while the last of
-- them is claimed, the others are not looked at.
CREATE OR REPLACE FUNCTION remove_ended_leases(p_lease_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_hashjoin = on
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_ids uuid[];
    v_fences uuid[];
    v_ended uuid[];
    v_are_single boolean;
BEGIN
    SELECT array_agg(l.job_ids[cardinality(l.job_ids)]), array_agg(l.lease_id), bool_and(cardinality(l.job_ids) = 1)
    INTO v_ids, v_fences, v_are_single
    FROM leases AS l
    WHERE l.lease_id = ANY (p_lease_ids);
    v_ended := ARRAY (SELECT unnest(v_fences) EXCEPT SELECT h.lease_id FROM held_jobs(v_ids, v_fences) AS h);
    IF v_ended = '{}' THEN
        RETURN;
    END IF;
    IF NOT v_are_single THEN
        SELECT array_agg(j.id), array_agg(j.lease_id) INTO v_ids, v_fences
        FROM (SELECT unnest(l.job_ids) AS id, l.lease_id FROM leases AS l WHERE l.lease_id = ANY (v_ended)) AS j;
        v_ended := ARRAY (SELECT unnest(v_ended) EXCEPT SELECT h.lease_id FROM held_jobs(v_ids, v_fences) AS h);
    END IF;
    DELETE FROM leases AS l
    WHERE l.lease_id = ANY (ARRAY (
        SELECT e.lease_id FROM leases AS e WHERE e.lease_id = ANY (v_ended) FOR UPDATE SKIP LOCKED));
END $$;
