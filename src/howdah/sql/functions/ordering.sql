-- Ordering keys: jobs with one key run one at a time, in enqueue order (P7).
--
-- Owns holds_key, the blocker of a waiting job, and the table unassigned_keys. A job with an ordering key
-- is inserted blocked. The key holder is the one job of a key that may run. When it finishes, the key is
-- handed over to the next job.
--
-- No statement here waits for another transaction. Two facts make that possible: a waiting job always has a
-- higher seq than its key holder (a job that commits late gets a new seq, decision 0003), and a key whose
-- holder cannot be decided now is recorded in unassigned_keys, which the duty `keys` processes on every
-- tick.

-- Gives a key to one waiting job, unless the job's row is locked. Returns whether it did.
CREATE OR REPLACE FUNCTION give_key_to_job(p_key text, p_job_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_lane jsonb;
BEGIN
    UPDATE live_jobs AS j
    SET holds_key = true,
        blockers = j.blockers - 1,
        run_at = requeue_at(j.queue, j.job_type, j.priority, j.run_at)
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

-- The seq of the key holder, locked so that it cannot finish before our commit; NULL if there is no holder
-- or its row is locked. KEY SHARE, so that heartbeats on it go on. If a transaction first updated the row
-- and then locked it exclusively (progress, then completion), KEY SHARE locks the old version, follows it
-- to the new one and waits there in spite of SKIP LOCKED: hence the lock_timeout.
CREATE OR REPLACE FUNCTION lock_key_holder(p_key text) RETURNS bigint
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

-- Makes sure that a key with waiting jobs has a holder. Called when an enqueue commits, which can ignore
-- jobs below its own seq, and for every row of unassigned_keys. Returns false if the key is left
-- unassigned. The statements are separate because each needs a new snapshot.
CREATE OR REPLACE FUNCTION assign_key(p_key text, p_from_seq bigint DEFAULT 0) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_holder_seq bigint;
    v_late uuid;
    v_next uuid;
BEGIN
    IF current_setting('transaction_isolation') = 'read committed' THEN
        v_holder_seq := lock_key_holder(p_key);
        -- The holder finishes after our commit, which is now, and that transaction sees our job.
        IF v_holder_seq IS NOT NULL THEN
            -- Jobs that commit late go behind the holder: the next job is searched above its seq. One by
            -- one, in seq order: a single UPDATE would go by id.
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
            -- A job that was locked (its cancellation may be rolled back) must be checked again.
            IF p_from_seq > 0 OR NOT EXISTS (
                SELECT FROM live_jobs AS w
                WHERE w.ordering_key = p_key AND NOT w.holds_key AND w.seq < v_holder_seq)
            THEN
                RETURN true;
            END IF;
            INSERT INTO unassigned_keys (ordering_key) VALUES (p_key);
            RETURN false;
        END IF;
        IF pg_try_advisory_xact_lock(hashtextextended(current_schema() || ':key:' || p_key, 0)) THEN
            IF NOT EXISTS (SELECT FROM live_jobs AS j WHERE j.ordering_key = p_key AND j.holds_key) THEN
                SELECT j.id INTO v_next
                FROM live_jobs AS j
                WHERE j.ordering_key = p_key AND NOT j.holds_key
                ORDER BY j.seq
                LIMIT 1;
                IF v_next IS NULL OR give_key_to_job(p_key, v_next) THEN
                    RETURN true;
                END IF;
            END IF;
        END IF;
    END IF;
    INSERT INTO unassigned_keys (ordering_key) VALUES (p_key);
    RETURN false;
END $$;

-- SECURITY DEFINER: before PostgreSQL 18 a deferred trigger runs as the role that commits, not as the role
-- that inserted the row.
CREATE OR REPLACE FUNCTION assign_key_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    v_own_xid xid := pg_current_xact_id()::xid;
BEGIN
    -- If this transaction wrote the previous job of the key, or its holder, the key is already assigned: a
    -- thousand jobs of one key search for its holder once.
    IF v_own_xid = (SELECT j.xmin FROM live_jobs AS j
               WHERE j.ordering_key = NEW.ordering_key AND NOT j.holds_key AND j.seq < NEW.seq
               ORDER BY j.seq DESC LIMIT 1)
       OR v_own_xid = (SELECT j.xmin FROM live_jobs AS j
                  WHERE j.ordering_key = NEW.ordering_key AND j.holds_key AND j.seq < NEW.seq
                  ORDER BY j.seq DESC LIMIT 1)
    THEN
        RETURN NULL;
    END IF;
    PERFORM assign_key(NEW.ordering_key, NEW.seq);
    RETURN NULL;
END $$;

-- Hands over the keys of finished holders, in key order. Runs after the statement that removed the holders,
-- so its snapshot shows every job that committed while the holder still existed.
CREATE OR REPLACE FUNCTION hand_over_keys(p_keys text[], p_seqs bigint[]) RETURNS void
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
        -- A snapshot that is older than this statement may not show the next job.
        IF current_setting('transaction_isolation') <> 'read committed'
           OR (v_next IS NOT NULL AND NOT give_key_to_job(v_freed.key, v_next))
        THEN
            INSERT INTO unassigned_keys (ordering_key) VALUES (v_freed.key);
        END IF;
    END LOOP;
END $$;

-- Processes unassigned_keys. Returns the number of keys it checked.
CREATE OR REPLACE FUNCTION assign_keys(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_keys text[];
BEGIN
    WITH drained AS (
        DELETE FROM unassigned_keys
        WHERE id = ANY (ARRAY (
            SELECT u.id FROM unassigned_keys AS u ORDER BY u.id LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING ordering_key)
    SELECT array_agg(DISTINCT d.ordering_key ORDER BY d.ordering_key) INTO v_keys FROM drained AS d;
    PERFORM assign_key(k.key) FROM unnest(v_keys) AS k (key);
    RETURN coalesce(cardinality(v_keys), 0);
END $$;
