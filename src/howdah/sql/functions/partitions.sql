-- Partitions of finished_jobs: one for each day on which jobs may be dropped (decision 0001).
--
-- Owns the daily partitions. Promises: retention never deletes rows job by job, and no completion waits for
-- DDL longer than these lock timeouts.

-- The duty `partitions`: creates the partitions of the coming days and drops those whose day has passed.
-- All DDL has a short lock_timeout; what cannot be locked now is retried on a later tick. Days beyond
-- p_days_ahead get partitions once the default partition holds a row of that day, so that few rows are ever
-- stored there.
CREATE OR REPLACE FUNCTION maintain_partitions(p_days_ahead int DEFAULT 40) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    v_partition text;
    v_emptied text[] := '{}';
    v_missing date[];
BEGIN
    -- TRUNCATE first: it needs no lock on the parent, so no completion waits for it.
    FOR v_partition IN
        SELECT c.oid::regclass::text
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'finished_jobs'::regclass
          AND c.relname ~ '^finished_jobs_[0-9]{8}$'
          AND c.relname <= partition_name(v_today)
        ORDER BY c.relname
    LOOP
        BEGIN
            EXECUTE format('TRUNCATE %s', v_partition);
            v_emptied := v_emptied || v_partition;
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'emptying partition % postponed: it is in use', v_partition;
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
            WHERE to_regclass(format('%I.%I', current_schema(), partition_name(d::date))) IS NULL
            ORDER BY d);
        IF v_missing <> '{}' THEN
            PERFORM create_partitions(v_missing);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        RAISE NOTICE 'new partitions postponed: finished_jobs is in use';
    END;

    -- One DROP for all: it only waits for the parent. Not in a tick that created partitions: completions
    -- would wait for the parent twice.
    IF v_emptied <> '{}' AND v_missing = '{}' THEN
        BEGIN
            EXECUTE 'DROP TABLE ' || array_to_string(v_emptied, ', ');
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'dropping empty partitions postponed: finished_jobs is in use';
        END;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION partition_name(p_day date) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN 'finished_jobs_' || lpad(extract(year FROM p_day)::text, 4, '0')
    || lpad(extract(month FROM p_day)::text, 2, '0') || lpad(extract(day FROM p_day)::text, 2, '0');

-- LIKE and ATTACH instead of PARTITION OF: completions go on while partitions are created. Rows in the
-- default partition are moved, most of them and their index entries, before anything is locked. Then the
-- parent is locked against completions before the default partition is: a completion on its way into the
-- default partition would fail if another partition took over its day.
CREATE OR REPLACE FUNCTION create_partitions(p_days date[]) RETURNS void
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
            partition_name(v_day), v_day, v_day + 1);
        PERFORM move_to_partition(v_day);
    END LOOP;
    LOCK TABLE finished_jobs IN SHARE ROW EXCLUSIVE MODE;
    LOCK TABLE finished_jobs_default IN ACCESS EXCLUSIVE MODE;
    FOREACH v_day IN ARRAY p_days LOOP
        PERFORM move_to_partition(v_day);
        EXECUTE format('ALTER TABLE finished_jobs ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       partition_name(v_day), v_day, v_day + 1);
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT drop_day', partition_name(v_day));
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION move_to_partition(p_day date) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    EXECUTE format(
        'WITH moved AS (DELETE FROM finished_jobs_default WHERE drop_on = %L RETURNING *) '
        'INSERT INTO %I SELECT * FROM moved', p_day, partition_name(p_day));
END $$;
