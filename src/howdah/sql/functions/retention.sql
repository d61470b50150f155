-- Retention: how long finished jobs and events stay, and what may be removed now (decision 0035).
--
-- Owns the day of a row in finished_jobs and job_events; partitions.sql owns the partitions of those days.
-- Promises: the events of a job stay for as long as its row and are dropped with their partition, and nothing is
-- removed because of one reading of the clock.

-- How long a finished job is kept.
CREATE OR REPLACE FUNCTION kept_for(p_status text, p_keep interval) RETURNS interval
LANGUAGE sql IMMUTABLE
RETURN CASE WHEN p_status = 'completed' THEN coalesce(p_keep, interval '7 days')
            ELSE coalesce(nullif(p_keep, interval '0'), interval '30 days') END;

-- The day of a job that finishes now: its row may be dropped when that day has begun. A job that is kept for less
-- than a day has the day of the partition finished_jobs_short.
CREATE OR REPLACE FUNCTION drop_day(p_status text, p_keep interval, p_now timestamptz) RETURNS date
LANGUAGE sql STABLE
RETURN CASE WHEN p_keep < interval '1 day' AND (p_keep > interval '0' OR p_status = 'completed')
            THEN date '1970-01-01'
            ELSE ((p_now + kept_for(p_status, p_keep)) AT TIME ZONE 'UTC')::date + 1 END;

-- The day of a job's events. It follows from columns that never change, so the events of a job are in one
-- partition, and finishing a job moves none of them: the day is late enough for every job that ends within a
-- week of its enqueue.
CREATE OR REPLACE FUNCTION events_day(p_created_at timestamptz, p_keep interval) RETURNS date
LANGUAGE sql IMMUTABLE
RETURN (timezone('UTC', p_created_at) + greatest(coalesce(p_keep, interval '30 days'), interval '30 days'))::date + 8;

-- The day for the events of a job that is still live. If its partition may soon be dropped, the events are stored
-- without a day, in the default partition, until the job finishes.
CREATE OR REPLACE FUNCTION live_events_day(p_created_at timestamptz, p_keep interval) RETURNS date
LANGUAGE sql STABLE
RETURN CASE WHEN events_day(p_created_at, p_keep) > timezone('UTC', statement_timestamp())::date + 1
            THEN events_day(p_created_at, p_keep) ELSE date '9999-12-31' END;

-- Moves the events of jobs to another day, or removes them: an array of [id, day, new day or null]. Events without
-- a day are moved, too.
CREATE OR REPLACE FUNCTION move_events(p_moves jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_move jsonb;
    v_id uuid;
    v_days date[];
BEGIN
    FOR v_move IN SELECT m FROM jsonb_array_elements(p_moves) AS m ORDER BY m ->> 0 LOOP
        v_id := v_move ->> 0;
        v_days := ARRAY[(v_move ->> 1)::date, date '9999-12-31'];
        IF v_move ->> 2 IS NULL THEN
            DELETE FROM job_events AS e WHERE e.job_id = v_id AND e.drop_on = ANY (v_days);
        ELSE
            UPDATE job_events AS e SET drop_on = (v_move ->> 2)::date
            WHERE e.job_id = v_id AND e.drop_on = ANY (v_days) AND e.drop_on <> (v_move ->> 2)::date;
        END IF;
    END LOOP;
END $$;

-- For jobs that finish now, given as an array of [id, created_at, keep]: their events go with the row, or stay for as
-- long as it. Few are moved: see events_day.
CREATE OR REPLACE FUNCTION move_events_of_finished(p_jobs jsonb, p_status text, p_now timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_moves jsonb;
BEGIN
    SELECT jsonb_agg(jsonb_build_array(j.id, d.events_day, CASE WHEN NOT d.goes THEN d.drop_on END)) INTO v_moves
    FROM (SELECT (e ->> 0)::uuid AS id, (e ->> 1)::timestamptz AS created_at, (e ->> 2)::interval AS keep
          FROM jsonb_array_elements(p_jobs) AS e) AS j
    CROSS JOIN LATERAL (
        SELECT events_day(j.created_at, j.keep) AS events_day, drop_day(p_status, j.keep, p_now) AS drop_on,
               p_status = 'completed' AND j.keep IS NOT DISTINCT FROM interval '0' AS goes) AS d
    WHERE d.goes OR d.drop_on > d.events_day;
    IF v_moves IS NOT NULL THEN
        PERFORM move_events(v_moves);
    END IF;
END $$;

-- The time before which a duty may remove what has expired. A reading of the clock counts once a later one, p_wait
-- after it, has shown that the clock did not jump ahead for a moment. Returns -infinity if another transaction runs
-- the duty.
CREATE OR REPLACE FUNCTION confirmed_time(p_duty text, p_wait interval) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_row record;
BEGIN
    SELECT m.observed, m.reached INTO v_row
    FROM maintenance AS m
    WHERE m.duty = p_duty
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN '-infinity';
    ELSIF v_row.observed > v_now THEN  -- the clock was ahead
        v_row.reached := least(v_row.reached, v_now);
        v_row.observed := v_now;
    ELSIF v_row.observed <= v_now - p_wait THEN
        v_row.reached := v_row.observed;
        v_row.observed := v_now;
    ELSE
        RETURN least(v_row.reached, v_now);
    END IF;
    UPDATE maintenance AS m SET observed = v_row.observed, reached = v_row.reached WHERE m.duty = p_duty;
    RETURN v_row.reached;
END $$;

-- Removes jobs that were kept for less than a day and expired from p_from until p_reached, and their events. Returns the
-- number of jobs; p_limit of them may mean that there are more.
CREATE OR REPLACE FUNCTION remove_expired(p_from timestamptz, p_reached timestamptz, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_from timestamp := timezone('UTC', p_from);
    v_until timestamp := timezone('UTC', p_reached);
    v_removed int;
    v_events jsonb;
BEGIN
    WITH removed AS (
        DELETE FROM finished_jobs_short
        WHERE ctid = ANY (ARRAY (
            SELECT f.ctid
            FROM finished_jobs_short AS f
            WHERE (f.completed_at AT TIME ZONE 'UTC') + f.keep BETWEEN v_from AND v_until
            ORDER BY (f.completed_at AT TIME ZONE 'UTC') + f.keep
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED))
        RETURNING id, created_at, keep, events_count)
    SELECT count(*),
           jsonb_agg(jsonb_build_array(r.id, events_day(r.created_at, r.keep), NULL))
               FILTER (WHERE r.events_count > 0)
    INTO v_removed, v_events
    FROM removed AS r;
    IF v_events IS NOT NULL THEN
        PERFORM move_events(v_events);
    END IF;
    RETURN v_removed;
END $$;
