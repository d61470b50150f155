-- Maintenance without a leader: each duty is a row of the table maintenance, and the transaction that locks
-- a due row runs one step of that duty.
--
-- Owns the table maintenance. The duties are in recovery.sql, clock.sql, ordering.sql, lanes.sql,
-- retention.sql and partitions.sql.
--
-- Promises: recovery comes first and never waits for another duty (P9); a step does a bounded amount of work,
-- and a duty with more to do is due again at once; a duty that fails or is slow neither stops nor undoes
-- another; no due time is postponed by a clock that was ahead for a while (decision 0030).

-- The duty `prune`. A table whose rows cannot be removed does not keep the others: the first problem is reported.
--
-- It starts where the last complete run ended: while a transaction elsewhere stays open, the rows that were removed stay in
-- the indexes, and a search from the start would read all of them. Once an hour it does, for rows that were locked then or
-- were committed late.
CREATE OR REPLACE FUNCTION prune(p_limit int DEFAULT 10000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_reached timestamptz := confirmed_time('prune', '30 seconds');
    v_from timestamptz;
    v_whole_at timestamptz;  -- when the last run that searched from the start began
    v_table text;
BEGIN
    SELECT (m.state ->> 'from')::timestamptz, (m.state ->> 'whole_at')::timestamptz INTO v_from, v_whole_at
    FROM maintenance AS m
    WHERE m.duty = 'prune';
    IF (v_from <= v_reached AND v_whole_at BETWEEN clock_timestamp() - interval '1 hour' AND clock_timestamp())
       IS NOT TRUE
    THEN
        v_from := '-infinity';
        v_whole_at := clock_timestamp();
    END IF;
    more := false;
    FOREACH v_table IN ARRAY ARRAY[
        'idempotency_keys', 'freed_keys', 'workers', 'watchers', 'throughput', 'finished_jobs_short']
    LOOP
        BEGIN
            more := prune_table(v_table, v_from, v_reached, p_limit) >= p_limit OR more;
        EXCEPTION WHEN OTHERS THEN
            problem := coalesce(problem, format('%s could not be pruned: %s', v_table, SQLERRM));
        END;
    END LOOP;
    IF NOT more AND problem IS NULL AND v_reached > '-infinity' THEN
        PERFORM remember('prune', v_reached, jsonb_build_object('from', v_reached, 'whole_at', v_whole_at));
    END IF;
END $$;

-- Removes some rows that expired from p_from until p_reached, and returns their number: idempotency keys, those that were
-- freed, watchers, throughput, jobs kept for less than a day, and workers not seen for a day.
-- One reading of the clock is not enough: see confirmed_time.
CREATE OR REPLACE FUNCTION prune_table(p_table text, p_from timestamptz, p_reached timestamptz, p_limit int)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_removed bigint;
BEGIN
    CASE p_table
    WHEN 'idempotency_keys' THEN
        DELETE FROM idempotency_keys
        WHERE ctid = ANY (ARRAY (
            SELECT k.ctid FROM idempotency_keys AS k
            WHERE k.expires_at BETWEEN p_from AND p_reached
            ORDER BY k.expires_at
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED));
    WHEN 'freed_keys' THEN
        RETURN remove_freed_keys(p_limit);
    WHEN 'workers' THEN
        DELETE FROM workers
        WHERE ctid = ANY (ARRAY (
            SELECT w.ctid FROM workers AS w
            WHERE w.seen_at < p_reached - interval '1 day'
               OR w.seen_at > clock_timestamp() + interval '1 day'  -- by a clock that was ahead
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED));
    WHEN 'watchers' THEN
        DELETE FROM watchers
        WHERE ctid = ANY (ARRAY (
            SELECT w.ctid FROM watchers AS w
            WHERE w.until BETWEEN p_from AND p_reached
            ORDER BY w.until
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED));
    WHEN 'throughput' THEN
        DELETE FROM throughput
        WHERE ctid = ANY (ARRAY (
            SELECT t.ctid FROM throughput AS t
            WHERE t.bucket >= p_from - interval '1 day' AND t.bucket < p_reached - interval '1 day'
            ORDER BY t.bucket
            LIMIT p_limit
            FOR UPDATE SKIP LOCKED));
    WHEN 'finished_jobs_short' THEN
        RETURN remove_expired(p_from, p_reached, p_limit);
    END CASE;
    GET DIAGNOSTICS v_removed = ROW_COUNT;
    RETURN v_removed;
END $$;

-- Writes what a duty remembers for its next run. Does not wait: without its row a duty only repeats work.
CREATE OR REPLACE FUNCTION remember(p_duty text, p_reached timestamptz, p_state jsonb) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    UPDATE maintenance
    SET reached = p_reached, state = p_state
    WHERE ctid = ANY (ARRAY (
        SELECT m.ctid FROM maintenance AS m WHERE m.duty = p_duty FOR NO KEY UPDATE SKIP LOCKED))
$$;

-- How long a duty waits after a run. `spacing` limits the share of the time that it uses, but not beyond five seconds or
-- the time that the run took: one slow run of a loaded server must not leave a hidden job waiting for a minute. A duty
-- that failed is retried soon, but uses at most a tenth of the time. The last minute of a run that took longer counts:
-- the clock may have jumped meanwhile.
CREATE OR REPLACE FUNCTION duty_wait(p_period interval, p_spacing int, p_took interval, p_failed boolean)
RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(
    CASE WHEN p_failed THEN least(p_period, interval '1 minute') ELSE p_period END,
    least(interval '1 minute',
          coalesce(p_took, interval '0') * CASE WHEN p_failed THEN greatest(10, p_spacing) ELSE p_spacing END,
          CASE WHEN NOT p_failed THEN greatest(interval '5 seconds', p_took) END));

-- A due time further ahead than the duty ever waits was written by a clock that was ahead: the duty is due.
CREATE OR REPLACE FUNCTION is_due(p_duty maintenance, p_now timestamptz) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE SET search_path FROM CURRENT
AS $$
    SELECT isfinite(p_duty.due_at)
       AND (p_duty.due_at <= p_now
            OR p_duty.due_at > p_now + duty_wait(
                p_duty.period, p_duty.spacing, p_duty.took, p_duty.last_error IS NOT NULL))
$$;

-- The duty `keys`: goes once through the keys that were waiting when the run began. A key whose holder is still
-- locked is recorded again, behind them, and waits for the next run. If a key cannot be assigned, each is tried
-- by itself.
CREATE OR REPLACE FUNCTION assign_waiting_keys(p_limit int DEFAULT 1000, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_last bigint := coalesce(
        (SELECT (m.state ->> 'last')::bigint FROM maintenance AS m WHERE m.duty = 'keys'),
        (SELECT max(u.id) FROM unassigned_keys AS u));
    v_done int;
    v_row record;
BEGIN
    BEGIN
        v_done := assign_keys(p_limit);
    EXCEPTION WHEN OTHERS THEN
        problem := SQLERRM;
        v_done := 0;
        FOR v_row IN
            SELECT u.id, u.ordering_key FROM unassigned_keys AS u
            ORDER BY u.id
            LIMIT 100
            FOR UPDATE SKIP LOCKED
        LOOP
            v_done := v_done + 1;
            BEGIN
                DELETE FROM unassigned_keys AS u WHERE u.id = v_row.id;
                PERFORM assign_key(v_row.ordering_key);
            EXCEPTION WHEN OTHERS THEN
                problem := format('the ordering key %s could not be assigned: %s', v_row.ordering_key, SQLERRM);
                UPDATE unassigned_keys AS u SET id = DEFAULT WHERE u.id = v_row.id;
            END;
        END LOOP;
    END;
    more := v_done > 0 AND EXISTS (SELECT FROM unassigned_keys AS u WHERE u.id <= v_last);
    PERFORM remember('keys', clock_timestamp(),
                     CASE WHEN more THEN jsonb_build_object('last', v_last) ELSE '{}' END);
END $$;

-- One step of a duty. more: there is more to do now. problem: what the step could not do.
CREATE OR REPLACE FUNCTION run_duty(p_duty text, OUT more boolean, OUT problem text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    more := false;
    CASE p_duty
        WHEN 'recover' THEN SELECT r.* INTO more, problem FROM recover_expired() AS r;
        WHEN 'keys' THEN SELECT r.* INTO more, problem FROM assign_waiting_keys() AS r;
        WHEN 'sweep' THEN problem := sweep_lanes();
        WHEN 'late' THEN SELECT r.* INTO more, problem FROM recover_late() AS r;
        WHEN 'clock' THEN SELECT r.* INTO more, problem FROM correct_clock() AS r;
        WHEN 'prune' THEN SELECT r.* INTO more, problem FROM prune() AS r;
        WHEN 'partitions' THEN PERFORM defer_partitions();
    END CASE;
END $$;

-- Runs one step of a duty in a subtransaction and records the outcome. A cancellation (statement_timeout, or an
-- operator's) ends the step, not the transaction: otherwise a duty that always takes too long would stay the
-- first that is due, and its error would be recorded nowhere.
CREATE OR REPLACE FUNCTION run_step(
    p_duty text, OUT duty text, OUT took interval, OUT error text, OUT more boolean, OUT cancelled boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_started timestamptz := clock_timestamp();
BEGIN
    duty := p_duty;
    cancelled := false;
    BEGIN
        SELECT r.more, r.problem INTO more, error FROM run_duty(p_duty) AS r;
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        more := false;
        error := SQLERRM;
        cancelled := SQLSTATE = '57014';
    END;
    took := least(greatest(clock_timestamp() - v_started, interval '0'), interval '1 minute');
    UPDATE maintenance AS m
    SET due_at = clock_timestamp() + CASE
            WHEN run_step.more THEN interval '0'
            ELSE duty_wait(m.period, m.spacing, run_step.took, run_step.error IS NOT NULL) END,
        last_run_at = v_started,
        took = run_step.took,
        last_error = run_step.error
    WHERE m.ctid = ANY (ARRAY (
        SELECT l.ctid FROM maintenance AS l WHERE l.duty = p_duty FOR NO KEY UPDATE SKIP LOCKED));
END $$;

-- The duties that keep jobs moving, are overdue, and whose row another transaction holds: one that ran them and
-- stays open. They run without their row, which then stays due. In the order in which they run.
CREATE OR REPLACE FUNCTION held_duties(p_now timestamptz) RETURNS SETOF text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT
AS $$
    SELECT m.duty
    FROM maintenance AS m
    WHERE m.duty IN ('recover', 'keys', 'sweep', 'late', 'clock') AND isfinite(m.due_at)
      AND m.due_at < p_now - interval '3 seconds'
      AND NOT EXISTS (
          SELECT FROM maintenance AS l WHERE l.duty = m.duty FOR NO KEY UPDATE SKIP LOCKED)
    ORDER BY m.rank
$$;

-- Runs one step of one due duty: recovery if it is due, else the one that has been due for longest. Returns no
-- row if none is due. Call it again while it returns a row, each call in its own transaction.
--
-- The row of a duty that ran without it (held_duties) stays due, so the caller passes such duties in p_ran, to run
-- each once.
CREATE OR REPLACE FUNCTION run_due_duty(p_ran text[] DEFAULT '{}')
RETURNS TABLE (duty text, took interval, error text, more boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_duty text;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    v_duty := (SELECT h FROM held_duties(v_now) AS h WHERE h <> ALL (p_ran) LIMIT 1);
    IF v_duty IS DISTINCT FROM 'recover' THEN
        v_duty := coalesce((
            SELECT m.duty
            FROM maintenance AS m
            WHERE is_due(m, v_now)
            ORDER BY m.duty = 'recover' DESC, m.due_at
            LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED), v_duty);
    END IF;
    IF v_duty IS NOT NULL THEN
        RETURN QUERY SELECT s.duty, s.took, s.error, s.more FROM run_step(v_duty) AS s;
    END IF;
END $$;

-- Runs the duties that are due in one transaction, for callers that use SQL alone. Recovery comes first, and
-- `partitions` runs at the commit, because its locks last until then. A duty with more to do goes on for up to a second,
-- or a quarter of statement_timeout. Like run_due_duty, it runs overdue duties without their row if another
-- transaction holds it.
CREATE OR REPLACE FUNCTION run_maintenance() RETURNS TABLE (duty text, took interval, error text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_started timestamptz := clock_timestamp();
    v_timeout interval := nullif(current_setting('statement_timeout'), '0')::interval;
    v_until timestamptz := v_started + least(interval '1 second', v_timeout / 4);
    v_duties text[];
    v_duty text;
    v_step record;
BEGIN
    IF current_setting('max_prepared_transactions') <> '0' THEN
        PERFORM refuse_two_phase_commit();
    END IF;
    v_duties := ARRAY (
        SELECT m.duty FROM maintenance AS m
        WHERE is_due(m, v_started)
        FOR NO KEY UPDATE SKIP LOCKED);
    v_duties := v_duties || ARRAY (SELECT h FROM held_duties(v_started) AS h WHERE h <> ALL (v_duties));
    FOR v_duty IN
        SELECT m.duty FROM maintenance AS m WHERE m.duty = ANY (v_duties) ORDER BY m.rank
    LOOP
        duty := v_duty;
        took := interval '0';
        LOOP
            SELECT * INTO v_step FROM run_step(v_duty);
            took := took + v_step.took;
            error := v_step.error;
            EXIT WHEN NOT v_step.more OR clock_timestamp() NOT BETWEEN v_started AND v_until;
        END LOOP;
        RETURN NEXT;
        EXIT WHEN v_step.cancelled;
    END LOOP;
END $$;
