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
--
-- Nor does a lock taken here outlive a commit: the key holder's row would be locked against its own worker. So
-- an enqueue assigns keys only while it commits (decision 0034).

-- No live job of this key has a lower seq. Searches for the jobs of a key start here: while a transaction elsewhere
-- stays open, the index keeps an entry of every job of the key that ended. A snapshot that is older than this
-- statement shows a lower floor.
CREATE OR REPLACE FUNCTION key_floor(p_key text) RETURNS bigint
LANGUAGE sql STABLE
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
    SELECT coalesce((
        SELECT s.key_floors[(hashtextextended(p_key, 0) & 31) + 1] FROM sweeps AS s ORDER BY s.id DESC LIMIT 1), 0)
$$;

-- The next floors, for sweep_lanes: the seq of the first live job of every 32nd of all keys, from the last floor on. A
-- transaction that is open commits no job with p_lasting_seq or a lower one.
--
-- Without enable_sort = off, PostgreSQL 18 may search live_jobs_ordered by seq alone, from key to key, and sort what it
-- finds: that reads the dead entries of every key (measured: 16,000 pages instead of 200).
CREATE OR REPLACE FUNCTION key_floors(p_last bigint[], p_lasting_seq bigint) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN RETURN ARRAY (
    SELECT least(p_lasting_seq + 1, (
        SELECT j.seq
        FROM live_jobs AS j
        WHERE (hashtextextended(j.ordering_key::text, 0) & 31) = b
          AND j.seq >= coalesce(p_last[b + 1], 0)
        ORDER BY j.seq
        LIMIT 1))
    FROM generate_series(0, 31) AS b
    ORDER BY b);
END $$;

-- The highest seq of a live job with an ordering key.
CREATE OR REPLACE FUNCTION highest_key_seq() RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
BEGIN RETURN (
    SELECT max((
        SELECT j.seq
        FROM live_jobs AS j
        WHERE (hashtextextended(j.ordering_key::text, 0) & 31) = b
        ORDER BY j.seq DESC
        LIMIT 1))
    FROM generate_series(0, 31) AS b);
END $$;

-- Gives a key to one waiting job, unless the job's row is locked. Returns whether it did. The job is found by its id
-- alone: through the index on keys, a search reads the dead entries of every job that has waited for the key.
CREATE OR REPLACE FUNCTION give_key_to_job(p_key text, p_job_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off
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
        WHERE w.id = p_job_id AND (w.ordering_key, w.holds_key) IS NOT DISTINCT FROM (p_key, false)
        FOR UPDATE SKIP LOCKED))
    RETURNING jsonb_build_array(jsonb_build_array(
        j.queue, j.job_type, extract(epoch FROM j.run_at), j.priority))
    INTO v_lane;
    IF v_lane IS NULL THEN
        RETURN false;
    END IF;
    -- A lane whose jobs are all blocked may have been removed.
    PERFORM add_lane(v_lane #>> '{0,0}', v_lane #>> '{0,1}', (v_lane #>> '{0,3}')::int);
    PERFORM wake_workers(v_lane);
    RETURN true;
END $$;

-- The seq of the key holder, locked so that it cannot finish before our commit; NULL if there is no holder
-- or its row is locked. KEY SHARE, so that heartbeats on it go on. If a transaction first updated the row
-- and then locked it exclusively (progress, then completion), KEY SHARE locks the old version, follows it
-- to the new one and waits there in spite of SKIP LOCKED: hence the lock_timeout.
CREATE OR REPLACE FUNCTION lock_key_holder(p_key text, p_floor bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET lock_timeout = '1ms'
AS $$
DECLARE
    v_seq bigint;
BEGIN
    SELECT j.seq INTO v_seq
    FROM live_jobs AS j
    WHERE j.ordering_key = p_key AND j.holds_key AND j.seq >= p_floor
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
    v_floor bigint := least(key_floor(p_key), nullif(p_from_seq, 0));  -- below it, if the sequence was set back
    v_holder_seq bigint;
    v_late uuid;
    v_next uuid;
BEGIN
    IF sees_new_commits() THEN
        v_holder_seq := lock_key_holder(p_key, v_floor);
        -- The holder finishes after our commit, which is now, and that transaction sees our job.
        IF v_holder_seq IS NOT NULL THEN
            -- Jobs that commit late go behind the holder: the next job is searched above its seq. With them go the
            -- later jobs of the transaction that commits now, so that its jobs keep their order. One by one, in seq
            -- order: a single UPDATE would go by id.
            FOR v_late IN
                SELECT w.id
                FROM live_jobs AS w
                WHERE w.ordering_key = p_key AND NOT w.holds_key
                  AND w.seq >= greatest(p_from_seq, v_floor)
                  AND (w.seq < v_holder_seq
                       OR p_from_seq > 0 AND p_from_seq < v_holder_seq AND is_own_write(w.xmin))
                ORDER BY w.seq
                FOR UPDATE SKIP LOCKED
            LOOP
                UPDATE live_jobs AS j SET seq = DEFAULT WHERE j.id = v_late;
            END LOOP;
            -- A job that was locked (its cancellation may be rolled back) must be checked again.
            IF p_from_seq > 0 OR NOT EXISTS (
                SELECT FROM live_jobs AS w
                WHERE w.ordering_key = p_key AND NOT w.holds_key
                  AND w.seq >= v_floor AND w.seq < v_holder_seq)
            THEN
                RETURN true;
            END IF;
            INSERT INTO unassigned_keys (ordering_key) VALUES (p_key);
            RETURN false;
        END IF;
        IF (p_from_seq = 0 OR key_budget(1) > 0)
           AND pg_try_advisory_xact_lock(hashtextextended(current_schema() || ':key:' || p_key, 0))
        THEN
            IF NOT EXISTS (
                SELECT FROM live_jobs AS j
                WHERE j.ordering_key = p_key AND j.holds_key AND j.seq >= v_floor)
            THEN
                SELECT j.id INTO v_next
                FROM live_jobs AS j
                WHERE j.ordering_key = p_key AND NOT j.holds_key AND j.seq >= v_floor
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

-- How many more keys without a holder this transaction may assign while it commits; p_take of them are taken.
-- Each needs an entry in the server's table of locks, which is small, so a transaction with many keys leaves
-- the others to the duty `keys`. -1: the transaction is not known to be committing.
--
-- The trigger below also runs before the commit: for SET CONSTRAINTS ... IMMEDIATE, and when a transaction is
-- prepared. The transaction commits now if the client's command is COMMIT, or is the one that enqueued. An
-- unusual form of COMMIT is not recognized and delays its keys until the duty's next tick.
CREATE OR REPLACE FUNCTION key_budget(p_take int) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_command text := extract(epoch FROM statement_timestamp());
    v_state text[] := string_to_array(current_setting('howdah.key_budget', true), ' ');
    v_budget int := v_state[2];
BEGIN
    IF v_state[1] IS DISTINCT FROM v_command THEN
        v_budget := CASE
            WHEN current_query() ~* '^\s*(commit|end)(\s+(work|transaction))?(\s+and\s+(no\s+)?chain)?\s*;?\s*$'
            THEN 16 ELSE -1 END;
    END IF;
    IF v_state[1] IS DISTINCT FROM v_command OR (p_take > 0 AND v_budget > 0) THEN
        PERFORM set_config('howdah.key_budget',
                           v_command || ' ' || (v_budget - CASE WHEN v_budget > 0 THEN p_take ELSE 0 END), true);
    END IF;
    RETURN v_budget;
END $$;

-- Before jobs with ordering keys are inserted: their trigger runs at the commit, also after SET CONSTRAINTS ALL
-- IMMEDIATE. A command that mentions constraints may set them to IMMEDIATE again before it ends.
CREATE OR REPLACE FUNCTION defer_keys() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_command text := extract(epoch FROM statement_timestamp());
BEGIN
    SET CONSTRAINTS live_jobs_assign_key DEFERRED;
    IF split_part(current_setting('howdah.key_budget', true), ' ', 1) IS DISTINCT FROM v_command THEN
        PERFORM set_config('howdah.key_budget',
                           v_command || CASE WHEN current_query() ~* 'constraints' THEN ' -1' ELSE ' 16' END,
                           true);
    END IF;
END $$;

-- Whether a row that is visible was written by this transaction, or by one of its subtransactions: those have xids of
-- their own, after that of the transaction, and what others have written is visible only when they have ended.
CREATE OR REPLACE FUNCTION is_own_write(p_xmin xid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_own bigint := pg_current_xact_id()::text::bigint;
    v_ahead bigint := (p_xmin::text::bigint - v_own) & 4294967295;  -- xids wrap around
BEGIN
    RETURN v_ahead = 0
        OR v_ahead < 2147483648 AND pg_xact_status((v_own + v_ahead)::text::xid8) = 'in progress';
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;  -- an xid of the future: the row is frozen, and keeps the xid of two billion transactions ago
END $$;

-- SECURITY DEFINER: before PostgreSQL 18 a deferred trigger runs as the role that commits, not as the role
-- that inserted the row.
CREATE OR REPLACE FUNCTION assign_key_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET jit = off
AS $$
DECLARE
    v_floor bigint := least(key_floor(NEW.ordering_key), NEW.seq);
BEGIN
    -- If this transaction wrote the previous job of the key, or its holder, the key is already assigned: a
    -- thousand jobs of one key search for its holder once.
    IF is_own_write((SELECT j.xmin FROM live_jobs AS j
                     WHERE j.ordering_key = NEW.ordering_key AND NOT j.holds_key
                       AND j.seq >= v_floor AND j.seq < NEW.seq
                     ORDER BY j.seq DESC LIMIT 1))
       OR is_own_write((SELECT j.xmin FROM live_jobs AS j
                        WHERE j.ordering_key = NEW.ordering_key AND j.holds_key
                          AND j.seq >= v_floor AND j.seq < NEW.seq
                        ORDER BY j.seq DESC LIMIT 1))
    THEN
        RETURN NULL;
    END IF;
    IF key_budget(0) < 0 THEN
        INSERT INTO unassigned_keys (ordering_key) VALUES (NEW.ordering_key);
    ELSE
        PERFORM assign_key(NEW.ordering_key, NEW.seq);
    END IF;
    RETURN NULL;
END $$;

-- Hands over the keys of finished holders, in key order. Runs after the statement that removed the holders,
-- so its snapshot shows every job that committed while the holder still existed. Of an unassigned key, a job that
-- committed late may still be below the holder's seq (see assign_key).
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
        WHERE j.ordering_key = v_freed.key AND NOT j.holds_key
          AND j.seq >= CASE WHEN EXISTS (SELECT FROM unassigned_keys AS u WHERE u.ordering_key = v_freed.key)
                            THEN key_floor(v_freed.key) ELSE v_freed.seq END
        ORDER BY j.seq
        LIMIT 1;
        -- A snapshot that is older than this statement may not show the next job.
        IF NOT sees_new_commits()
           OR (v_next IS NOT NULL AND NOT give_key_to_job(v_freed.key, v_next))
        THEN
            INSERT INTO unassigned_keys (ordering_key) VALUES (v_freed.key);
        END IF;
    END LOOP;
END $$;

-- Processes unassigned_keys. Returns the number of keys it checked.
CREATE OR REPLACE FUNCTION assign_keys(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off
AS $$
DECLARE
    v_keys text[];
BEGIN
    IF NOT sees_new_commits() THEN
        RAISE EXCEPTION 'ordering keys cannot be assigned in a transaction that is %',
                        upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Run maintenance in a READ COMMITTED transaction: '
                         'see default_transaction_isolation of the role and the database.';
    END IF;
    WITH drained AS (
        DELETE FROM unassigned_keys
        WHERE ctid = ANY (ARRAY (
            SELECT u.ctid FROM unassigned_keys AS u ORDER BY u.id LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING ordering_key)
    SELECT array_agg(DISTINCT d.ordering_key ORDER BY d.ordering_key) INTO v_keys FROM drained AS d;
    PERFORM assign_key(k.key) FROM unnest(v_keys) AS k (key);
    RETURN coalesce(cardinality(v_keys), 0);
END $$;
