-- Partitions of finished_jobs and job_events: one for each day on which rows may be dropped (decisions 0001
-- and 0035).
--
-- Owns the daily partitions. Promises: retention never deletes rows job by job, except for jobs that are kept for
-- less than a day, and no completion waits for DDL longer than these lock timeouts.

-- The duty `partitions`: creates the partitions of the coming days and drops those whose day has passed.
-- All DDL has a short lock_timeout; what cannot be locked now is retried on a later tick.
CREATE OR REPLACE FUNCTION maintain_partitions(p_days_ahead int DEFAULT 40) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    v_expired date := (confirmed_time('partitions', '10 minutes') AT TIME ZONE 'UTC')::date;
BEGIN
    PERFORM maintain_partitions_of('finished_jobs', v_expired, v_today, 1, p_days_ahead);
    -- The events of a job that is enqueued today get a day at least 38 days ahead.
    PERFORM maintain_partitions_of('job_events', v_expired, v_today, 37, p_days_ahead);
END $$;

-- The duty runs while its transaction commits: completions wait for its locks, which last until the end of the
-- transaction, and a caller's may stay open. Nothing tells a function whether its call is a transaction of its own.
CREATE OR REPLACE FUNCTION defer_partitions() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM defer_keys();
    SET CONSTRAINTS maintenance_partitions DEFERRED;
END $$;

-- Runs the duty and records its outcome. It must not fail: the transaction is that of the caller. If the transaction
-- is not known to commit (see key_budget), the duty is due again.
CREATE OR REPLACE FUNCTION maintain_partitions_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_started timestamptz := clock_timestamp();
    v_took interval;
    v_error text;
BEGIN
    IF key_budget(0) < 0 THEN
        RAISE NOTICE 'partitions were not maintained: this transaction is not known to commit now';
        UPDATE maintenance AS m SET due_at = v_started WHERE m.duty = 'partitions';
        RETURN NULL;
    END IF;
    BEGIN
        PERFORM maintain_partitions();
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        v_error := SQLERRM;
        RAISE WARNING 'the duty partitions failed: %', v_error;
    END;
    v_took := least(greatest(clock_timestamp() - v_started, interval '0'), interval '1 minute');
    UPDATE maintenance AS m
    SET due_at = clock_timestamp() + duty_wait(m.period, m.spacing, v_took, v_error IS NOT NULL),
        took = v_took,
        last_error = v_error
    WHERE m.duty = 'partitions';
    RETURN NULL;
END $$;

-- One partition is emptied in a tick, the oldest that has rows: a clock that is weeks ahead for an hour costs a day
-- of history. Days without a partition get one once the default partition holds a row of that day, so that few
-- rows are ever stored there.
CREATE OR REPLACE FUNCTION maintain_partitions_of(
    p_parent text, p_expired date, p_today date, p_first int, p_last int)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_day date;
    v_empty text[] := '{}';
    v_emptied boolean := false;
    v_has_rows boolean;
    v_missing date[];
BEGIN
    FOR v_day IN SELECT d FROM partition_days(p_parent) AS d WHERE d <= p_expired ORDER BY d LOOP
        BEGIN
            EXECUTE format('SELECT EXISTS (SELECT FROM %I)', partition_name(p_parent, v_day)) INTO v_has_rows;
            CONTINUE WHEN v_has_rows AND v_emptied;
            IF v_has_rows AND p_parent = 'job_events' THEN
                PERFORM keep_events_of_live_jobs(v_day);
            END IF;
            -- TRUNCATE first: it needs no lock on the parent, so no completion waits for it.
            EXECUTE format('TRUNCATE %I', partition_name(p_parent, v_day));
            v_empty := v_empty || quote_ident(partition_name(p_parent, v_day));
            v_emptied := v_emptied OR v_has_rows;
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'emptying partition % postponed: it is in use', partition_name(p_parent, v_day);
        END;
    END LOOP;

    BEGIN
        EXECUTE format('DELETE FROM %I WHERE drop_on <= $1', p_parent || '_default') USING p_expired;
        v_missing := ARRAY (
            SELECT d::date
            FROM (SELECT p_today + generate_series(p_first, p_last)
                  UNION
                  SELECT days_in_default(p_parent, p_today + 1, p_today + 400)) AS days (d)
            WHERE to_regclass(format('%I.%I', current_schema(), partition_name(p_parent, d::date))) IS NULL
            ORDER BY d);
        IF v_missing <> '{}' THEN
            PERFORM create_partitions(p_parent, v_missing);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        RAISE NOTICE 'new partitions postponed: % is in use', p_parent;
    END;

    -- One DROP for all: it only waits for the parent. Not in a tick that created partitions: completions
    -- would wait for the parent twice.
    IF v_empty <> '{}' AND v_missing = '{}' THEN
        BEGIN
            EXECUTE 'DROP TABLE ' || array_to_string(v_empty, ', ');
        EXCEPTION WHEN lock_not_available THEN
            RAISE NOTICE 'dropping empty partitions postponed: % is in use', p_parent;
        END;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION partition_name(p_parent text, p_day date) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN p_parent || '_' || lpad(extract(year FROM p_day)::text, 4, '0')
    || lpad(extract(month FROM p_day)::text, 2, '0') || lpad(extract(day FROM p_day)::text, 2, '0');

CREATE OR REPLACE FUNCTION partition_days(p_parent text) RETURNS SETOF date
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT to_date(right(c.relname, 8), 'YYYYMMDD')
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = quote_ident(p_parent)::regclass AND c.relname ~ '^[a-z_]+_[0-9]{8}$'
$$;

-- The days of rows in a default partition, each found by one search of its index: many rows may be kept there for
-- years.
CREATE OR REPLACE FUNCTION days_in_default(p_parent text, p_first date, p_last date) RETURNS SETOF date
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
DECLARE
    v_day date := p_first - 1;
BEGIN
    LOOP
        EXECUTE format('SELECT min(drop_on) FROM %I WHERE drop_on > $1 AND drop_on <= $2', p_parent || '_default')
        INTO v_day USING v_day, p_last;
        EXIT WHEN v_day IS NULL;
        RETURN NEXT v_day;
    END LOOP;
END $$;

-- Events of a job that is still live stay, whatever their day. No events are added to a partition within its last
-- day, and a job that finishes meanwhile has locked its events.
CREATE OR REPLACE FUNCTION keep_events_of_live_jobs(p_day date) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    EXECUTE format(
        'UPDATE job_events AS e SET drop_on = date ''9999-12-31'' '
        'FROM live_jobs AS j WHERE e.drop_on = %L AND e.job_id = j.id AND j.events_count > 0', p_day);
END $$;

-- LIKE and ATTACH instead of PARTITION OF: completions go on while partitions are created. Rows in the
-- default partition are moved, most of them and their index entries, before anything is locked. Then the
-- parent is locked against completions before the default partition is: a completion on its way into the
-- default partition would fail if another partition took over its day.
CREATE OR REPLACE FUNCTION create_partitions(p_parent text, p_days date[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_day date;
BEGIN
    FOREACH v_day IN ARRAY p_days LOOP
        EXECUTE format(
            'CREATE TABLE %I (LIKE %I '
            'INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES, '
            'CONSTRAINT drop_day CHECK (drop_on >= %L AND drop_on < %L))',
            partition_name(p_parent, v_day), p_parent, v_day, v_day + 1);
        PERFORM move_to_partition(p_parent, v_day);
    END LOOP;
    EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', p_parent);
    EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', p_parent || '_default');
    FOREACH v_day IN ARRAY p_days LOOP
        PERFORM move_to_partition(p_parent, v_day);
        EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       p_parent, partition_name(p_parent, v_day), v_day, v_day + 1);
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT drop_day', partition_name(p_parent, v_day));
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION move_to_partition(p_parent text, p_day date) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    EXECUTE format(
        'WITH moved AS (DELETE FROM %I WHERE drop_on = %L RETURNING *) '
        'INSERT INTO %I SELECT * FROM moved', p_parent || '_default', p_day, partition_name(p_parent, p_day));
END $$;
