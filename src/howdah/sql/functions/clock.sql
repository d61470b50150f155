-- Correct what was written while the server's clock was ahead: the duty `clock`.
--
-- It remembers the latest time that it has seen. A later time than now shows that the clock went back. Then jobs that
-- were enqueued, failed or claimed "in the future" would stay hidden or claimed until that time comes. Their delays and
-- leases start now: when they were written follows from created_at, from the event of the failure, or from claimed_at.
-- A time that is more than an hour after that was probably chosen by a caller, and is kept. The row of a lease has the
-- time when it was written.
--
-- Promises: a job with such a time is corrected although its transaction commits later, or its row is locked. Every
-- transaction that wrote one began before the clock went back, so those that are open when this is noticed are noted, and
-- the jobs are searched again when one of them has ended. While none ends, no job is searched; the
-- leases, which are few, are read in each run.

-- One step of a search through all live jobs, in the order of their ids. The state of the duty:
--   seen:     the time that the clock had reached when it went back, until it comes or all jobs are corrected
--   place:    where the search goes on; none between two searches
--   writers:  transactions that may still commit such a time
--   locked:   jobs that were locked, up to 1000: they are tried again by id
--   rest:     whether there were more; then all jobs are searched again when some of the locks have ended
CREATE OR REPLACE FUNCTION correct_clock(p_limit int DEFAULT 5000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_duty maintenance;
    v_jumped boolean;
    v_seen timestamptz;
    v_place uuid;
    v_open text[];
    v_writers text[];
    v_locked uuid[];
    v_rest boolean;
    v_are_leases_left boolean;
    v_ids uuid[];
BEGIN
    more := false;
    SELECT m.* INTO v_duty FROM maintenance AS m WHERE m.duty = 'clock';
    v_jumped := v_duty.reached > v_now + interval '1 second';
    v_seen := greatest(v_duty.reached, (v_duty.state ->> 'seen')::timestamptz);
    IF v_seen <= v_now + interval '1 second' THEN
        PERFORM remember('clock', v_now, '{}');
        RETURN;
    END IF;
    IF NOT sees_new_commits() THEN
        problem := needs_new_commits();
        RETURN;
    END IF;
    v_place := v_duty.state ->> 'place';
    v_writers := ARRAY (SELECT jsonb_array_elements_text(v_duty.state -> 'writers'));
    v_locked := ARRAY (SELECT jsonb_array_elements_text(v_duty.state -> 'locked'));
    v_rest := coalesce((v_duty.state -> 'rest')::boolean, false);
    v_open := writers_of_jobs();
    v_are_leases_left := correct_leases(v_now);
    IF v_jumped OR v_place IS NULL AND (NOT v_writers <@ v_open OR v_rest AND cardinality(v_locked) < 1000) THEN
        v_place := '00000000-0000-0000-0000-000000000000';
        v_rest := false;
        v_writers := ARRAY (
            SELECT o FROM unnest(v_open) AS o WHERE v_jumped OR o = ANY (v_writers) OR o LIKE 'prepared %');
    END IF;
    v_ids := ARRAY (SELECT j.id FROM live_jobs AS j WHERE j.id > v_place ORDER BY j.id LIMIT p_limit);
    v_locked := correct_jobs(v_ids, v_locked, v_now);
    IF cardinality(v_locked) > 1000 THEN
        v_rest := true;
        v_writers := ARRAY (SELECT unnest(v_writers) UNION SELECT unnest(writers_of_jobs()));
    END IF;
    more := cardinality(v_ids) = p_limit;
    PERFORM remember('clock', v_now, CASE
        WHEN more OR v_rest OR v_are_leases_left OR v_writers <> '{}' OR v_locked <> '{}' THEN jsonb_build_object(
            'seen', v_seen, 'place', CASE WHEN more THEN v_ids[p_limit] END, 'writers', v_writers,
            'locked', v_locked[:1000], 'rest', v_rest)
        ELSE '{}' END);
END $$;

-- Corrects those of p_ids and p_locked that the clock that was ahead has written. p_locked: jobs that an earlier step could
-- not correct. Returns those that are locked now.
CREATE OR REPLACE FUNCTION correct_jobs(p_ids uuid[], p_locked uuid[], p_now timestamptz) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
DECLARE
    v_ids uuid[] := p_locked || p_ids;
    v_corrected uuid[];
    v_lanes jsonb;
BEGIN
    WITH ahead AS MATERIALIZED (
        SELECT j.id, written_at(j, p_now) AS written
        FROM live_jobs AS j
        WHERE j.id = ANY (v_ids)
          AND greatest(j.created_at, j.run_at, j.claimed_at) > p_now + interval '1 second'
        ORDER BY j.id
        FOR NO KEY UPDATE SKIP LOCKED),
    corrected AS (
        UPDATE live_jobs AS j
        SET run_at = CASE WHEN j.status = 'claimed' THEN least(j.run_at, p_now)
                          -- A job is due no earlier than it was written, but for the time that its statement took.
                          -- An earlier time was written by the right clock.
                          WHEN j.run_at BETWEEN greatest(p_now, a.written - interval '10 seconds')
                                            AND a.written + interval '1 hour'
                          THEN clock_timestamp() + greatest(j.run_at - a.written, interval '0')
                          ELSE j.run_at END,
            -- The day of a job's events follows from created_at.
            created_at = CASE WHEN j.events_count = 0 THEN least(j.created_at, p_now) ELSE j.created_at END,
            -- Not least(), which ignores NULL: a job that was not started would count as started.
            claimed_at = CASE WHEN j.claimed_at > p_now THEN p_now ELSE j.claimed_at END,
            started_at = CASE WHEN j.started_at > p_now THEN p_now ELSE j.started_at END
        FROM ahead AS a
        WHERE j.id = a.id AND j.id = ANY (v_ids) AND a.written IS NOT NULL
        RETURNING j.id, j.queue, j.job_type, j.run_at, j.status)
    SELECT array_agg(c.id),
           jsonb_agg(DISTINCT jsonb_build_array(c.queue, c.job_type, extract(epoch FROM c.run_at)))
               FILTER (WHERE c.status = 'pending')
    INTO v_corrected, v_lanes
    FROM corrected AS c;
    PERFORM wake_workers(v_lanes);
    RETURN ARRAY (
        SELECT j.id
        FROM live_jobs AS j
        WHERE j.id = ANY (v_ids)
          AND greatest(j.created_at, j.run_at, j.claimed_at) > p_now + interval '1 second'
          AND written_at(j, p_now) IS NOT NULL
          AND j.id <> ALL (coalesce(v_corrected, '{}'))
        ORDER BY j.id);
END $$;

-- When the clock that was ahead wrote a job's due time or claim; NULL if it did not.
CREATE OR REPLACE FUNCTION written_at(p_job live_jobs, p_now timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT CASE
        WHEN p_job.status = 'claimed' THEN CASE WHEN p_job.claimed_at > p_now THEN p_job.claimed_at END
        WHEN p_job.created_at > p_now THEN p_job.created_at
        WHEN p_job.attempts > 0 THEN (
            SELECT max(e.at) FROM job_events AS e
            WHERE e.job_id = p_job.id AND e.kind = 'error' AND e.at > p_now
              AND e.drop_on IN (events_day(p_job.created_at, p_job.keep), date '9999-12-31'))
    END
$$;

-- Corrects leases that the clock that was ahead has written: they are as long as before, from now on, and an excuse that
-- it has written does not count. A heartbeat since then has left the time of the claim alone. Returns whether some are
-- locked.
CREATE OR REPLACE FUNCTION correct_leases(p_now timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_ahead timestamptz := p_now + interval '1 second';
BEGIN
    UPDATE leases AS l
    SET claimed_at = least(l.claimed_at, p_now),
        written_at = least(l.written_at, p_now),
        is_excused = l.is_excused AND l.written_at <= v_ahead,
        expires_at = CASE WHEN l.written_at > v_ahead THEN p_now + (l.expires_at - l.written_at) ELSE l.expires_at END
    WHERE l.lease_id = ANY (ARRAY (
        SELECT a.lease_id FROM leases AS a
        WHERE greatest(a.written_at, a.claimed_at) > v_ahead
        FOR NO KEY UPDATE SKIP LOCKED));
    RETURN EXISTS (SELECT FROM leases AS l WHERE greatest(l.written_at, l.claimed_at) > v_ahead);
END $$;
