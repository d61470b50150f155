-- Maintenance without a leader: each duty is a row, and whoever moves its due_at forward runs it.

-- Makes the leaves of the coming days and drops those whose day has come. All under a short
-- lock_timeout: what cannot be had now is had on a later tick. A retention beyond p_days_ahead gets
-- leaves of its own once the default leaf has caught a row of it, so that little is ever caught there.
CREATE FUNCTION tend_leaves(p_days_ahead int DEFAULT 40) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    v_leaf text;
    v_emptied text[] := '{}';
    v_missing date[];
BEGIN
    -- Emptied first: that needs no lock on the parent, so no completion waits for it.
    FOR v_leaf IN
        SELECT c.oid::regclass::text
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'finished_jobs'::regclass
          AND c.relname ~ '^finished_jobs_[0-9]{8}$'
          AND c.relname <= leaf_name(v_today)
        ORDER BY c.relname
    LOOP
        BEGIN
            EXECUTE format('TRUNCATE %s', v_leaf);
            v_emptied := v_emptied || v_leaf;
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'leaf % postponed: it is in use', v_leaf;
        END;
    END LOOP;

    BEGIN
        DELETE FROM finished_jobs_default WHERE drop_on <= v_today;
        v_missing := ARRAY (
            SELECT d::date
            FROM (SELECT generate_series(v_today + 1, v_today + p_days_ahead, interval '1 day')
                  UNION
                  SELECT f.drop_on
                  FROM finished_jobs_default AS f
                  WHERE f.drop_on BETWEEN v_today + 1 AND v_today + 400) AS days (d)
            WHERE to_regclass(format('%I.%I', current_schema(), leaf_name(d::date))) IS NULL
            ORDER BY d);
        IF v_missing <> '{}' THEN
            PERFORM make_leaves(v_missing);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        RAISE NOTICE 'new leaves postponed: finished_jobs is in use';
    END;

    -- Dropped together: their parent is all that is left to wait for. Not in a tick that made leaves:
    -- completions would wait for it twice.
    IF v_emptied <> '{}' AND v_missing = '{}' THEN
        BEGIN
            EXECUTE 'DROP TABLE ' || array_to_string(v_emptied, ', ');
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'empty leaves stay for now: finished_jobs is in use';
        END;
    END IF;
END $$;

CREATE FUNCTION leaf_name(p_day date) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN 'finished_jobs_' || lpad(extract(year FROM p_day)::text, 4, '0')
    || lpad(extract(month FROM p_day)::text, 2, '0') || lpad(extract(day FROM p_day)::text, 2, '0');

-- LIKE and ATTACH instead of PARTITION OF: completions go on while leaves are made. Rows that the default
-- leaf caught move over, most of them, with their index entries, before anything is locked. Then the
-- parent is locked against completions before the default leaf: one that was on its way into the
-- default leaf when another leaf took its day would be refused.
CREATE FUNCTION make_leaves(p_days date[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_day date;
BEGIN
    FOREACH v_day IN ARRAY p_days LOOP
        EXECUTE format(
            'CREATE TABLE %I (LIKE finished_jobs '
            'INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES, '
            'CONSTRAINT drop_day CHECK (drop_on >= %L AND drop_on < %L))',
            leaf_name(v_day), v_day, v_day + 1);
        PERFORM move_to_leaf(v_day);
    END LOOP;
    LOCK TABLE finished_jobs IN SHARE ROW EXCLUSIVE MODE;
    LOCK TABLE finished_jobs_default IN ACCESS EXCLUSIVE MODE;
    FOREACH v_day IN ARRAY p_days LOOP
        PERFORM move_to_leaf(v_day);
        EXECUTE format('ALTER TABLE finished_jobs ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       leaf_name(v_day), v_day, v_day + 1);
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT drop_day', leaf_name(v_day));
    END LOOP;
END $$;

CREATE FUNCTION move_to_leaf(p_day date) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    EXECUTE format(
        'WITH caught AS (DELETE FROM finished_jobs_default WHERE drop_on = %L RETURNING *) '
        'INSERT INTO %I SELECT * FROM caught', p_day, leaf_name(p_day));
END $$;

-- Removes what nothing refers to any more: expired keys, events of cleared jobs, lost workers.
CREATE FUNCTION prune(p_limit int DEFAULT 10000) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    DELETE FROM idempotency_keys
    WHERE key = ANY (ARRAY (
        SELECT k.key FROM idempotency_keys AS k
        WHERE k.expires_at <= clock_timestamp()
        ORDER BY k.expires_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED));
    DELETE FROM job_events
    WHERE (job_id, event_id) IN (
        SELECT e.job_id, e.event_id
        FROM job_events AS e
        WHERE e.at < clock_timestamp() - interval '31 days'
          AND NOT EXISTS (SELECT FROM jobs AS j WHERE j.id = e.job_id)
        LIMIT p_limit);
    DELETE FROM workers
    WHERE worker_id = ANY (ARRAY (
        SELECT w.worker_id FROM workers AS w
        WHERE w.seen_at < clock_timestamp() - interval '1 day'
        FOR UPDATE SKIP LOCKED));
    DELETE FROM watchers
    WHERE ctid = ANY (ARRAY (
        SELECT w.ctid FROM watchers AS w
        WHERE w.until < clock_timestamp()
        FOR UPDATE SKIP LOCKED));
END $$;

CREATE FUNCTION run_duty(p_duty text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    CASE p_duty
        WHEN 'recover' THEN PERFORM recover_stale_jobs();
        WHEN 'settle' THEN PERFORM settle_keys();
        WHEN 'prune' THEN PERFORM prune();
        WHEN 'leaves' THEN PERFORM tend_leaves();
    END CASE;
END $$;

-- Runs every duty that is due and that nobody else is running. Each stands alone: one that fails says
-- so in its row and in the answer, and the others go on. The leaves come last, because their locks
-- last until the commit.
CREATE FUNCTION run_maintenance() RETURNS TABLE (duty text, took interval, error text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_duty record;
    v_began timestamptz;
BEGIN
    FOR v_duty IN
        SELECT m.duty, m.period
        FROM maintenance AS m
        WHERE m.due_at <= clock_timestamp()
        ORDER BY m.rank
        FOR UPDATE SKIP LOCKED
    LOOP
        v_began := clock_timestamp();
        duty := v_duty.duty;
        error := NULL;
        BEGIN
            PERFORM run_duty(v_duty.duty);
        EXCEPTION WHEN OTHERS THEN
            error := SQLERRM;
        END;
        took := clock_timestamp() - v_began;
        UPDATE maintenance AS m
        SET due_at = clock_timestamp() + greatest(m.period, m.spacing * run_maintenance.took),
            last_run_at = v_began,
            took = run_maintenance.took,
            last_error = run_maintenance.error
        WHERE m.duty = v_duty.duty;
        RETURN NEXT;
    END LOOP;
END $$;

INSERT INTO maintenance (duty, rank, period)
VALUES ('recover', 10, '2 seconds'),
       ('settle', 20, '1 second'),
       ('prune', 40, '1 minute'),
       ('leaves', 90, '1 hour');

SELECT tend_leaves();
