-- Order and blocking. A job with an ordering key is inserted blocked; whoever holds the key is the
-- one job of it that may run. The key goes from holder to next in line when the holder finishes.
--
-- Two facts make this work without waiting: a job that waits for a key always has a higher seq than
-- its holder (a late committer draws a new seq), and what cannot be decided now is left in
-- `unsettled`, which is drained on every tick.

-- A wake-up call for idle workers, one per statement. NOTIFY serialises commits, hence the gate.
CREATE FUNCTION wake_workers(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    -- One that was killed cannot take its flag back: it counts for a minute.
    IF p_lanes IS NOT NULL AND EXISTS (
        SELECT FROM workers WHERE idle AND seen_at > clock_timestamp() - interval '1 minute')
    THEN
        PERFORM pg_notify(current_schema() || ':wake',
                          CASE WHEN octet_length(p_lanes::text) < 7000 THEN p_lanes::text ELSE '[]' END);
    END IF;
END $$;

-- Tells those who watch these jobs that something changed; they look for themselves what it was.
CREATE FUNCTION tell_watchers(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM watchers) THEN
        PERFORM pg_notify(current_schema() || ':job', t.job_id::text)
        FROM (SELECT DISTINCT w.job_id FROM watchers AS w WHERE w.job_id = ANY (p_ids)) AS t;
    END IF;
END $$;

-- Tells the workers that have these jobs to look at their leases now: one was cancelled or taken away.
CREATE FUNCTION tell_workers(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_ids <> '{}' THEN
        PERFORM pg_notify(current_schema() || ':cancel',
                          CASE WHEN cardinality(p_ids) <= 150 THEN to_json(p_ids)::text ELSE '[]' END);
    END IF;
END $$;

-- When a job that becomes pending again is due.
CREATE FUNCTION due_again(p_queue text, p_job_type text, p_priority int, p_run_at timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE
RETURN p_run_at;

-- Gives a key to one waiting job, if that job can be had without waiting for anyone.
CREATE FUNCTION give_key(p_key text, p_job_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_lane jsonb;
BEGIN
    UPDATE live_jobs AS j
    SET holds_key = true,
        blockers = j.blockers - 1,
        run_at = due_again(j.queue, j.job_type, j.priority, j.run_at)
    WHERE j.id = ANY (ARRAY (
        SELECT w.id
        FROM live_jobs AS w
        WHERE w.id = p_job_id AND w.ordering_key = p_key AND NOT w.holds_key
        FOR UPDATE SKIP LOCKED))
    RETURNING jsonb_build_array(jsonb_build_array(j.queue, j.job_type, extract(epoch FROM j.run_at)))
    INTO v_lane;
    IF v_lane IS NULL THEN
        RETURN false;
    END IF;
    PERFORM wake_workers(v_lane);
    RETURN true;
END $$;

-- The seq of a key's holder, which is kept from finishing until our commit; NULL if it cannot be had.
-- KEY SHARE, so that its heartbeats go on. But where a transaction has first updated the row and then
-- locked it for good (progress, then completion), KEY SHARE gets the old version, follows it to the
-- new one and waits there in spite of SKIP LOCKED: hence the timeout.
CREATE FUNCTION hold_holder(p_key text) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '1ms'
AS $$
DECLARE
    v_seq bigint;
BEGIN
    SELECT j.seq INTO v_seq
    FROM live_jobs AS j
    WHERE j.ordering_key = p_key AND j.holds_key
    ORDER BY j.seq DESC
    LIMIT 1
    FOR KEY SHARE SKIP LOCKED;
    RETURN v_seq;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

-- Sees to it that a key with waiting jobs has a holder. Called at the commit of an enqueue, which need
-- not look below its own seq, and for every row of `unsettled`. Separate statements on purpose: each
-- needs a fresh snapshot.
CREATE FUNCTION settle_key(p_key text, p_from_seq bigint DEFAULT 0) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_holder_seq bigint;
    v_late uuid;
    v_next uuid;
BEGIN
    IF current_setting('transaction_isolation') = 'read committed' THEN
        v_holder_seq := hold_holder(p_key);
        -- Its finisher comes after our commit, which is now, and sees our job.
        IF v_holder_seq IS NOT NULL THEN
            -- Late committers go behind the holder: the next in line is looked for above its seq. One
            -- by one, in their own order: an UPDATE of all would go by id.
            FOR v_late IN
                SELECT w.id
                FROM live_jobs AS w
                WHERE w.ordering_key = p_key AND NOT w.holds_key
                  AND w.seq >= p_from_seq AND w.seq < v_holder_seq
                ORDER BY w.seq
                FOR UPDATE SKIP LOCKED
            LOOP
                UPDATE live_jobs AS j SET seq = DEFAULT WHERE j.id = v_late;
            END LOOP;
            -- One that was locked (a cancel may yet be rolled back) has to be looked at again.
            IF p_from_seq > 0 OR NOT EXISTS (
                SELECT FROM live_jobs AS w
                WHERE w.ordering_key = p_key AND NOT w.holds_key AND w.seq < v_holder_seq)
            THEN
                RETURN true;
            END IF;
            INSERT INTO unsettled (ordering_key) VALUES (p_key);
            RETURN false;
        END IF;
        IF pg_try_advisory_xact_lock(hashtextextended(current_schema() || ':key:' || p_key, 0)) THEN
            IF NOT EXISTS (SELECT FROM live_jobs AS j WHERE j.ordering_key = p_key AND j.holds_key) THEN
                SELECT j.id INTO v_next
                FROM live_jobs AS j
                WHERE j.ordering_key = p_key AND NOT j.holds_key
                ORDER BY j.seq
                LIMIT 1;
                IF v_next IS NULL OR give_key(p_key, v_next) THEN
                    RETURN true;
                END IF;
            END IF;
        END IF;
    END IF;
    INSERT INTO unsettled (ordering_key) VALUES (p_key);
    RETURN false;
END $$;

-- SECURITY DEFINER: until PostgreSQL 18 a deferred trigger runs as whoever commits, not as whoever inserted.
CREATE FUNCTION settle_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    v_us xid := pg_current_xact_id()::xid;
BEGIN
    -- Where the job before it in line, or the holder, was written by this very transaction, the key is
    -- settled: a thousand jobs of one key look for its holder once.
    IF v_us = (SELECT j.xmin FROM live_jobs AS j
               WHERE j.ordering_key = NEW.ordering_key AND NOT j.holds_key AND j.seq < NEW.seq
               ORDER BY j.seq DESC LIMIT 1)
       OR v_us = (SELECT j.xmin FROM live_jobs AS j
                  WHERE j.ordering_key = NEW.ordering_key AND j.holds_key AND j.seq < NEW.seq
                  ORDER BY j.seq DESC LIMIT 1)
    THEN
        RETURN NULL;
    END IF;
    PERFORM settle_key(NEW.ordering_key, NEW.seq);
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER live_jobs_settle
    AFTER INSERT ON live_jobs
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW
    WHEN (NEW.blockers > 0 AND NEW.ordering_key IS NOT NULL)
    EXECUTE FUNCTION settle_at_commit();

-- Hands the keys of finished holders on, in key order. Runs after the statement that removed them,
-- so its snapshot shows every job that was committed while the holder was still there.
CREATE FUNCTION hand_over_keys(p_keys text[], p_seqs bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_freed record;
    v_next uuid;
BEGIN
    FOR v_freed IN
        SELECT k.key, k.seq FROM unnest(p_keys, p_seqs) AS k (key, seq) ORDER BY k.key
    LOOP
        SELECT j.id INTO v_next
        FROM live_jobs AS j
        WHERE j.ordering_key = v_freed.key AND NOT j.holds_key AND j.seq > v_freed.seq
        ORDER BY j.seq
        LIMIT 1;
        -- An older snapshot than this statement's may not show the next in line.
        IF current_setting('transaction_isolation') <> 'read committed'
           OR (v_next IS NOT NULL AND NOT give_key(v_freed.key, v_next))
        THEN
            INSERT INTO unsettled (ordering_key) VALUES (v_freed.key);
        END IF;
    END LOOP;
END $$;

-- Drains what could not be settled at once. Returns how many keys it looked at.
CREATE FUNCTION settle_keys(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_keys text[];
BEGIN
    WITH drained AS (
        DELETE FROM unsettled
        WHERE id = ANY (ARRAY (
            SELECT u.id FROM unsettled AS u ORDER BY u.id LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING ordering_key)
    SELECT array_agg(DISTINCT d.ordering_key ORDER BY d.ordering_key) INTO v_keys FROM drained AS d;
    PERFORM settle_key(k.key) FROM unnest(v_keys) AS k (key);
    RETURN coalesce(cardinality(v_keys), 0);
END $$;
