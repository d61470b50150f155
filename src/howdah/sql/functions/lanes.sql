-- Lanes and their heads: a lane is one (queue, job type, priority); a claim searches the index lane by
-- lane.
--
-- Owns the tables lanes and sweeps. While a transaction elsewhere stays open, claimed jobs leave index
-- entries that vacuum cannot remove, and every claim would scan all of them. So each lane has a head, a lower bound
-- for the due time of its first pending job, and a claim starts there. This keeps a claim's cost independent of
-- dead entries (P10).
--
-- Only sweep_lanes moves heads, and finds what they hide (decision 0031). It also removes lanes that are no longer
-- used (decision 0032).

-- Adds a lane unless another transaction is adding it now: its commit, or sweep_lanes, makes the lane
-- visible. A row that sweep_lanes is about to remove does not count; the new row is then its twin. One lock for
-- every 32nd of all lanes, because the server's table of locks is small: a transaction may add any number of
-- lanes, and a lane whose lock another transaction holds is left to sweep_lanes (decision 0034). So is one whose row an
-- older snapshot does not show: adding it would fail.
CREATE OR REPLACE FUNCTION add_lane(p_queue text, p_job_type text, p_priority int) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_twin boolean;
BEGIN
    IF NOT is_lane_missing(p_queue, p_job_type, p_priority) OR NOT sees_new_commits() THEN
        RETURN;
    END IF;
    v_twin := coalesce(
        (SELECT NOT l.twin
         FROM lanes AS l
         WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
         LIMIT 1),
        false);
    IF pg_try_advisory_xact_lock(lane_lock(p_queue, p_job_type, p_priority, v_twin)) THEN
        INSERT INTO lanes (queue, job_type, priority, twin)
        VALUES (p_queue, p_job_type, p_priority, v_twin)
        ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- Adds lanes: [[queue, job type, priority], ...]; NULL: none.
CREATE OR REPLACE FUNCTION add_lanes(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_lanes IS NOT NULL THEN
        PERFORM add_lane(l ->> 0, l ->> 1, (l ->> 2)::int) FROM jsonb_array_elements(p_lanes) AS l;
    END IF;
END $$;

-- The lock of add_lane: one for every 32nd of all lanes.
CREATE OR REPLACE FUNCTION lane_lock(p_queue text, p_job_type text, p_priority int, p_twin boolean) RETURNS bigint
LANGUAGE sql STABLE
RETURN hashtextextended(
    concat_ws(':', current_schema(), 'lanes', p_twin, hashtextextended(
        concat_ws(':', p_priority, p_queue, p_job_type), 0) & 31), 0);

-- How far a head stays behind the clock, for enqueues that have not committed: their jobs are due no
-- earlier than the enqueue started. A notification carries the due time of a job whose enqueue takes
-- longer, and sweep_lanes finds the job in any case (decision 0017).
CREATE OR REPLACE FUNCTION head_margin() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN interval '250 milliseconds';

-- The head of a lane. The planner inlines this, and reads the row of sweeps once for all lanes.
CREATE OR REPLACE FUNCTION lane_head(p_number int) RETURNS TABLE (head_at timestamptz)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT s.raised FROM sweeps AS s ORDER BY s.id DESC LIMIT 1)[p_number % 256 + 1], '-infinity')
    OFFSET 0;
END;

-- The lanes of these types and queues that have a due job, and the first such job of each. Search them in the order of
-- priority DESC, first_run_at. p_types: hash_types of many types, or NULL. The planner inlines this.
CREATE OR REPLACE FUNCTION due_lanes(
    p_job_types text[], p_types jsonb, p_queues text[], p_now timestamptz, p_due_from timestamptz)
RETURNS TABLE (queue text, job_type text, priority int, first_run_at timestamptz, is_suspect boolean)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT l.queue, l.job_type, l.priority, first.run_at, first.is_suspect
    FROM lanes AS l
    CROSS JOIN LATERAL lane_head(l.number) AS h
    CROSS JOIN LATERAL (
        SELECT j.run_at::timestamptz AS run_at, j.claims > j.attempts AS is_suspect
        FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = l.queue AND j.job_type = l.job_type AND j.priority = l.priority
          AND j.run_at >= CASE WHEN h.head_at > p_now THEN '-infinity'
                               ELSE least(h.head_at, p_due_from) END
          AND j.run_at <= p_now
        ORDER BY j.run_at, j.id
        LIMIT 1) AS first
    WHERE l.queue = ANY (p_queues)
      AND (p_job_types IS NULL
           OR CASE WHEN p_types IS NULL THEN l.job_type = ANY (p_job_types)
                   ELSE p_types ? l.job_type END);
END;

-- Whether a lane is missing or about to be removed.
CREATE OR REPLACE FUNCTION is_lane_missing(p_queue text, p_job_type text, p_priority int) RETURNS boolean
LANGUAGE sql STABLE
RETURN NOT EXISTS (
    SELECT FROM lanes AS l
    WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority AND l.closing = 0);

-- The due time of a job that becomes pending again: where a claim will look, so neither below the head nor
-- in the future. (If every requeue lowered the head instead, updates of the lane would be lost, and
-- claims would scan dead entries again.) A snapshot that is older than the statement may show an old head.
CREATE OR REPLACE FUNCTION requeue_at(
    p_queue text, p_job_type text, p_priority int, p_run_at timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT greatest(p_run_at, (
        SELECT CASE WHEN sees_new_commits()
                    THEN least(min(coalesce((
                        SELECT s.raised FROM sweeps AS s ORDER BY s.id DESC LIMIT 1)[l.number % 256 + 1], '-infinity')),
                        clock_timestamp())
                    ELSE clock_timestamp() END
        FROM lanes AS l
        WHERE l.queue = p_queue AND l.job_type = p_job_type AND l.priority = p_priority
        HAVING count(*) > 0))
$$;

-- The duty `sweep`: adds missing lanes, lowers a head that hides a job, moves back a head that lies in the
-- future, raises the others, and removes unused lanes. Returns what it could not do.
--
-- One sweep at a time. Its lock ends with it and not with the transaction: a transaction that stays open after it ran
-- maintenance must not stop the sweeps of others. A cancellation at the wrong moment leaves the lock with its session, so
-- there is another lock every three seconds: that costs a few sweeps and no more.
CREATE OR REPLACE FUNCTION sweep_lanes() RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_lock bigint := hashtextextended(
        concat_ws(':', current_schema(), 'sweep', floor(extract(epoch FROM clock_timestamp()) / 3)), 0);
    v_locked boolean := false;
BEGIN
    IF NOT sees_new_commits() THEN
        RETURN needs_new_commits();
    END IF;
    BEGIN
        v_locked := pg_try_advisory_lock(v_lock);
        IF v_locked THEN
            PERFORM add_missing_lanes();
            PERFORM store_sweep();
            PERFORM pg_advisory_unlock(v_lock);
        END IF;
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        IF v_locked THEN
            PERFORM pg_advisory_unlock(v_lock);
        END IF;
        RAISE;
    END;
    RETURN NULL;
END $$;

-- Sweeps every lane and stores what the next sweep needs.
--
-- A job below its head was written by a transaction that read a lower head. A transaction that starts to write after a
-- sweep reads the heads of that sweep or higher ones. So for each open transaction a sweep notes the last sweep before it
-- was found, and keeps the heads of those sweeps: when it has ended, each lane is searched from them (decision 0031).
--
-- The order matters: first the heads and the last seq, then which transactions are writing, then the jobs. A
-- transaction that starts to write after the second step reads these heads or higher ones and gets a higher seq; one
-- that ended before it is visible to the third step.
--
-- Sweeps have ascending ids. One in a transaction that stays open becomes visible after later ones, and is ignored then.
-- For that, each sweep that does not see the last id is stored, although nothing has changed. One that finds another
-- when it is about to be stored is not: it did not know the heads of that one.
CREATE OR REPLACE FUNCTION store_sweep() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = on SET enable_mergejoin = off SET enable_nestloop = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_last sweeps;
    v_kept timestamptz[];      -- the heads that the last sweep has kept
    v_count int;               -- of its lanes
    v_lanes lanes[];
    v_heads timestamptz[];
    v_places int[];            -- of the lanes among those of the last sweep
    v_open text[];
    v_searched int[];          -- the places of the sweeps whose heads the ended transactions may have read, 0: unknown
    v_lasting boolean;         -- whether a transaction that the last sweep had found is still open
    v_from timestamptz;
    v_head timestamptz;
    v_is_due boolean;
    v_closing int;
    v_began timestamptz := clock_timestamp();
    v_slot int;
    v_sweep int;
    v_from_id bigint;
    -- The arrays of v_new: in the record, each assignment to one place would copy the whole array.
    v_stored timestamptz[] := '{}';
    v_unknown boolean[] := '{}';  -- the lanes whose heads are unknown, or were written by a clock that was ahead
    v_raised timestamptz[] := array_fill(NULL::timestamptz, ARRAY[256]);
    v_quiet int[] := '{}';
    v_used timestamptz[] := '{}';
    v_is_last boolean;         -- whether no later sweep is in a transaction that is still open
    v_new sweeps;
BEGIN
    SELECT s.* INTO v_last FROM sweeps AS s ORDER BY s.id DESC LIMIT 1;
    v_is_last := v_last.id = (SELECT s.last_value FROM sweeps_id_seq AS s);
    v_kept := v_last.heads;
    v_count := cardinality(v_last.lanes);
    PERFORM renumber_lanes();
    SELECT coalesce(array_agg(l ORDER BY l.number), '{}'),
           coalesce(array_agg(l.number ORDER BY l.number), '{}'),
           array_agg(coalesce(v_last.raised[l.number % 256 + 1], '-infinity') ORDER BY l.number),
           array_agg(p.place ORDER BY l.number)
    INTO v_lanes, v_new.lanes, v_heads, v_places
    FROM lanes AS l
    -- Of a number that two lanes share, nothing is known.
    LEFT JOIN (
        SELECT u.number, min(u.place) AS place
        FROM unnest(v_last.lanes) WITH ORDINALITY AS u (number, place)
        WHERE u.number NOT IN (SELECT d.number FROM lanes AS d GROUP BY d.number HAVING count(*) > 1)
        GROUP BY u.number
        HAVING count(*) = 1) AS p ON p.number = l.number;
    v_new.seqs := ARRAY (SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END FROM live_jobs_seq_seq AS s);
    IF v_new.seqs[1] < v_last.seqs[1] THEN
        -- The sequence was set back, or was not replicated. The keys of jobs that were enqueued since may have no holder.
        PERFORM setval('live_jobs_seq_seq', greatest(v_last.seqs[1], highest_key_seq()));
        v_last.seqs := array_fill(0::bigint, ARRAY[cardinality(v_last.seqs)]);
        v_last.key_floors := NULL;
        INSERT INTO unassigned_keys (ordering_key)
        SELECT DISTINCT j.ordering_key FROM live_jobs AS j WHERE j.ordering_key IS NOT NULL AND NOT j.holds_key;
    END IF;
    v_open := writers_of_jobs();
    v_new.writers := noted_writers(v_open, v_last.writers, coalesce(v_last.id, 0));
    v_new.kept_sweeps := NULL::bigint || ARRAY (SELECT DISTINCT w.value::bigint FROM jsonb_each(v_new.writers) AS w);
    v_searched := ARRAY (
        SELECT coalesce(array_position(v_last.kept_sweeps, w.sweep), 0)
        FROM (SELECT v_last.id AS sweep
              UNION SELECT e.value::bigint FROM jsonb_each(v_last.writers) AS e WHERE e.key <> ALL (v_open)) AS w);
    v_lasting := coalesce(v_last.writers ?| v_open, false);

    FOR n IN 1..cardinality(v_lanes) LOOP
        v_from := '-infinity';
        v_unknown[n] := (greatest(v_heads[n], v_kept[v_places[n]]) <= clock_timestamp()) IS NOT TRUE
            OR v_places[n] IS NULL;
        IF NOT v_unknown[n] THEN
            v_from := 'infinity';
            FOREACH v_sweep IN ARRAY v_searched LOOP
                v_from := least(v_from, coalesce(v_kept[(v_sweep - 1) * v_count + v_places[n]], '-infinity'));
            END LOOP;
        END IF;
        v_used[n] := coalesce(v_last.used[v_places[n]], v_began);
        SELECT s.head_at, s.is_due, s.closing INTO v_head, v_is_due, v_closing FROM sweep_lane(
            v_lanes[n], v_heads[n], v_from, v_lasting,
            coalesce(v_last.quiet[v_places[n]] < 2 OR v_new.seqs[1] <> v_last.seqs[1], true),
            v_used[n] NOT BETWEEN v_began - interval '10 minutes' AND v_began) AS s;
        IF v_closing = 0 OR v_is_due AND v_used[n] < v_began - interval '1 minute' THEN
            v_used[n] := v_began;
        END IF;
        v_slot := v_lanes[n].number % 256 + 1;
        v_raised[v_slot] := least(v_raised[v_slot], v_head);
        v_stored[n] := least(v_heads[n], v_head);
        v_quiet[n] := CASE WHEN v_is_due OR v_new.seqs[1] IS DISTINCT FROM v_last.seqs[1] THEN 0
                               ELSE least(coalesce(v_last.quiet[v_places[n]], 0) + 1, 2) END;
    END LOOP;
    FOR k IN 2..cardinality(v_new.kept_sweeps) LOOP
        v_sweep := coalesce(array_position(v_last.kept_sweeps, v_new.kept_sweeps[k]), 0);
        v_new.seqs[k] := coalesce(v_last.seqs[v_sweep], 0);
        FOR n IN 1..cardinality(v_lanes) LOOP
            -- Their transactions may have read a head that was lowered now. If the clock was ahead, they may write
            -- below any head.
            v_stored[(k - 1) * cardinality(v_lanes) + n] := CASE
                WHEN v_unknown[n] THEN '-infinity'
                ELSE least(v_stored[n], coalesce(v_kept[(v_sweep - 1) * v_count + v_places[n]], '-infinity')) END;
        END LOOP;
    END LOOP;
    v_new.heads := v_stored;
    v_new.raised := v_raised;
    v_new.quiet := v_quiet;
    v_new.used := v_used;
    -- No open transaction commits a job with one of these seqs or a lower one.
    v_new.key_floors := key_floors(v_last.key_floors, (
        SELECT min(q) FROM unnest(coalesce(v_last.seqs[1], 0) || v_new.seqs[2:]) AS q));
    IF (v_new.writers, v_new.lanes, v_new.heads[:cardinality(v_lanes)], v_new.raised, v_new.quiet, v_new.used,
        v_new.seqs[1], v_new.key_floors)
       IS DISTINCT FROM
       (v_last.writers, v_last.lanes, v_kept[:v_count], v_last.raised, v_last.quiet, v_last.used,
        v_last.seqs[1], v_last.key_floors)
       OR v_is_last IS NOT TRUE
    THEN
        IF (SELECT max(s.id) FROM sweeps AS s) IS DISTINCT FROM v_last.id THEN
            RETURN;
        END IF;
        v_new.id := nextval('sweeps_id_seq');
        IF v_new.id <= v_last.id THEN  -- this sequence was set back
            v_new.id := setval('sweeps_id_seq', v_last.id + 1);
        END IF;
        v_new.kept_sweeps[1] := v_new.id;
        INSERT INTO sweeps SELECT v_new.*;
        -- Now and then all: sweeps of transactions that stayed open are behind the last one.
        v_from_id := CASE WHEN v_new.id % 64 = 0 THEN 0 ELSE v_last.id END;
        DELETE FROM sweeps
        WHERE ctid = ANY (ARRAY (
            SELECT s.ctid FROM sweeps AS s WHERE s.id >= v_from_id AND s.id <= v_last.id FOR UPDATE SKIP LOCKED));
    END IF;
END $$;

-- The transactions that are writing, each with the last sweep before it was found. At most sixteen sweeps: a transaction
-- may be noted with an earlier one.
CREATE OR REPLACE FUNCTION noted_writers(p_open text[], p_noted jsonb, p_last_sweep bigint) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT
AS $$
    WITH noted AS (
        SELECT o.writer, coalesce(
                   (p_noted ->> o.writer)::bigint,
                   -- It may be noted under another name: see writers_of_jobs.
                   CASE WHEN o.writer LIKE 'prepared %' THEN (
                       SELECT min(n.value::bigint) FROM jsonb_each_text(p_noted) AS n) END,
                   p_last_sweep) AS sweep
        FROM unnest(p_open) AS o (writer)),
    latest AS (
        SELECT max(s.sweep) AS sweep
        FROM (SELECT DISTINCT n.sweep FROM noted AS n ORDER BY n.sweep LIMIT 16) AS s)
    SELECT coalesce(jsonb_object_agg(n.writer, least(n.sweep, l.sweep)), '{}')
    FROM noted AS n
    CROSS JOIN latest AS l
$$;

-- Adds the lanes of pending jobs that have none: a lane whose transaction was rolled back, or that was
-- removed while a transaction with an old snapshot used it. Searches only between the lanes that exist:
-- inside a lane, the search would read its dead entries. (Before PostgreSQL 18, a row comparison such as
-- (queue, job_type) < (x, y) does not end a scan: it would read the rest of the queue.)
CREATE OR REPLACE FUNCTION add_missing_lanes() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
DECLARE
    v_missing jsonb;
    v_previous jsonb;
BEGIN
    LOOP
        v_missing := (SELECT jsonb_agg(to_jsonb(m)) FROM missing_lanes() AS m);
        -- An open transaction is adding a lane that was found again.
        EXIT WHEN v_missing IS NULL OR v_missing = v_previous;
        PERFORM add_missing_lane(m ->> 'queue', m ->> 'job_type', (m ->> 'priority')::int)
        FROM jsonb_array_elements(v_missing) AS m;
        -- The workers that were woken for these jobs have not found them.
        PERFORM wake_workers((
            SELECT jsonb_agg(jsonb_build_array(
                m ->> 'queue', m ->> 'job_type', extract(epoch FROM clock_timestamp())))
            FROM jsonb_array_elements(v_missing) AS m));
        v_previous := v_missing;
    END LOOP;
END $$;

-- Adds a row of a lane. If an open transaction is adding it, its row cannot be added here, but its twin can: jobs of other
-- transactions must not wait for that one. It does not need the lock of add_lane, which an open transaction may hold for
-- another lane: lock_timeout ends a wait for a row that is being added. It takes the lock if it can, so that an enqueue
-- does not wait for this transaction.
CREATE OR REPLACE FUNCTION add_missing_lane(p_queue text, p_job_type text, p_priority int) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '1ms'
AS $$
BEGIN
    FOR n IN 0..1 LOOP
        PERFORM pg_try_advisory_xact_lock(lane_lock(p_queue, p_job_type, p_priority, n = 1));
        BEGIN
            INSERT INTO lanes (queue, job_type, priority, twin)
            SELECT p_queue, p_job_type, p_priority, n = 1
            WHERE is_lane_missing(p_queue, p_job_type, p_priority)
            ON CONFLICT DO NOTHING;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
END $$;

-- Gives lanes that share a number new ones: the sequence of a replica or of a restored table may start again.
CREATE OR REPLACE FUNCTION renumber_lanes() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM lanes AS l GROUP BY l.number HAVING count(*) > 1) THEN
        RETURN;
    END IF;
    PERFORM setval('lanes_number_seq', greatest(max(l.number), (SELECT s.last_value FROM lanes_number_seq AS s)))
    FROM lanes AS l;
    UPDATE lanes
    SET number = DEFAULT
    WHERE ctid = ANY (ARRAY (
        SELECT l.ctid
        FROM lanes AS l
        WHERE l.ctid IN (
            SELECT d.ctid
            FROM (SELECT o.ctid, row_number() OVER (PARTITION BY o.number) AS n FROM lanes AS o) AS d
            WHERE d.n > 1)
        FOR UPDATE SKIP LOCKED));
END $$;

-- The first pending job without a lane in each gap between queues, between the job types of a queue and
-- between the priorities of a job type.
CREATE OR REPLACE FUNCTION missing_lanes() RETURNS TABLE (queue text, job_type text, priority int)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
AS $$
    WITH queues AS (
        SELECT q.queue, lead(q.queue) OVER (ORDER BY q.queue) AS until
        FROM (SELECT '' COLLATE "C" AS queue UNION SELECT l.queue FROM lanes AS l) AS q),
    types AS (
        SELECT t.queue, t.job_type,
               lead(t.job_type) OVER (PARTITION BY t.queue ORDER BY t.job_type) AS until
        FROM (SELECT l.queue, '' COLLATE "C" AS job_type FROM lanes AS l
              UNION SELECT l.queue, l.job_type FROM lanes AS l) AS t),
    priorities AS (
        SELECT p.queue, p.job_type, p.priority,
               lead(p.priority, 1, 1001) OVER (
                   PARTITION BY p.queue, p.job_type ORDER BY p.priority) AS until
        FROM (SELECT l.queue, l.job_type, -1001 AS priority FROM lanes AS l
              UNION SELECT l.queue, l.job_type, l.priority FROM lanes AS l) AS p)
    SELECT f.* FROM queues AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue > g.queue AND j.queue < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    UNION ALL
    SELECT f.* FROM queues AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue > g.queue
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    WHERE g.until IS NULL
    UNION ALL
    SELECT f.* FROM types AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0
          AND j.queue = g.queue AND j.job_type > g.job_type AND j.job_type < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    UNION ALL
    SELECT f.* FROM types AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue = g.queue AND j.job_type > g.job_type
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
    WHERE g.until IS NULL
    UNION ALL
    SELECT f.* FROM priorities AS g CROSS JOIN LATERAL (
        SELECT j.queue::text, j.job_type::text, j.priority::int FROM live_jobs AS j
        WHERE j.status = 'pending' AND j.blockers = 0 AND j.queue = g.queue AND j.job_type = g.job_type
          AND j.priority > g.priority AND j.priority < g.until
        ORDER BY j.queue, j.job_type, j.priority DESC LIMIT 1) AS f
$$;

-- The other transactions that have written or locked jobs or leases and not ended: a function may lock jobs, read the
-- clock, and write them only after it has waited for another table. Their locks are released after their commit can be seen, so the
-- next statement sees what a transaction that is not among them has written. Virtual transaction ids start again when the
-- server does, also after a crash, hence the process and the start of the server. A prepared transaction gets a new name
-- when it is prepared, and when the server is restarted. Our functions refuse to be prepared, an INSERT into live_jobs
-- cannot.
CREATE OR REPLACE FUNCTION writers_of_jobs() RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN RETURN ARRAY (
    SELECT DISTINCT CASE WHEN k.pid IS NULL THEN 'prepared ' ELSE '' END
        || concat_ws(' ', k.virtualtransaction, k.pid, extract(epoch FROM pg_postmaster_start_time()))
    FROM pg_locks AS k
    WHERE k.locktype = 'relation' AND k.relation IN ('live_jobs'::regclass, 'leases'::regclass)
      AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND k.mode IN ('RowExclusiveLock', 'RowShareLock') AND k.pid IS DISTINCT FROM pg_backend_pid());
END $$;

-- Sweeps one lane, as it was before writers_of_jobs. p_from: no hidden job is due earlier, so the dead entries below
-- are not read. p_lasting: see sweep_lanes. p_raise: whether jobs of the lane may have been claimed since the sweep
-- before the last. p_is_unused: for ten minutes no sweep has found a due job. Returns the new head, whether a job is due,
-- and how far the lane's removal is, if that was decided now.
CREATE OR REPLACE FUNCTION sweep_lane(
    p_lane lanes, p_head timestamptz, p_from timestamptz, p_lasting boolean, p_raise boolean, p_is_unused boolean,
    OUT head_at timestamptz, OUT is_due boolean, OUT closing int)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_from timestamptz := least(p_from, p_head);
    v_first timestamptz;
BEGIN
    SELECT j.run_at INTO v_first
    FROM live_jobs AS j
    WHERE j.status = 'pending' AND j.blockers = 0
      AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority
      -- Not beyond: jobs that were cancelled before they were due leave dead entries there.
      AND j.run_at >= v_from AND j.run_at <= v_began
    ORDER BY j.run_at, j.id
    LIMIT 1;
    head_at := least(p_head, v_began - head_margin());
    is_due := v_first IS NOT NULL;
    IF v_first < head_at THEN
        head_at := v_first;
        PERFORM wake_workers(jsonb_build_array(jsonb_build_array(
            p_lane.queue, p_lane.job_type, extract(epoch FROM v_first))));
    ELSIF p_raise OR is_due THEN
        head_at := least(v_first, v_began - head_margin());
    END IF;
    IF p_lane.closing > 0 OR p_is_unused AND NOT is_due THEN
        closing := close_lane(p_lane, p_lasting);
        PERFORM store_closing(p_lane, closing);
    END IF;
END $$;

-- Decides on the removal of an unused lane, in steps (decision 0032). A lane in which no sweep has found a due job for
-- ten minutes closes: enqueues that see this add a new row. Those that do not see it have started to write before the
-- next sweep. When no transaction spans the two sweeps after that one, their jobs are visible: the row is removed, or
-- opened again if it has a job. A job that is claimed meanwhile adds the lane again when it is requeued, as an enqueue
-- does. Returns the next step; 0: the lane stays, 3: it is removed.
CREATE OR REPLACE FUNCTION close_lane(p_lane lanes, p_lasting boolean) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_is_empty boolean;
BEGIN
    IF p_lane.closing = 1 OR p_lane.closing = 2 AND p_lasting THEN
        RETURN 2;
    ELSIF p_lane.closing = 2 THEN
        v_is_empty := NOT EXISTS (
            SELECT FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority);
        -- Dead entries of a lane are skipped only while the lane exists.
        RETURN CASE WHEN v_is_empty AND clock_timestamp() - v_began < interval '5 milliseconds' THEN 3 ELSE 0 END;
    END IF;
    RETURN (NOT EXISTS (
            SELECT FROM lanes AS l
            WHERE l.queue = p_lane.queue AND l.job_type = p_lane.job_type
              AND l.priority = p_lane.priority AND l.closing > 0)
        AND NOT EXISTS (
            SELECT FROM live_jobs AS j
            WHERE j.status = 'pending' AND j.blockers = 0
              AND j.queue = p_lane.queue AND j.job_type = p_lane.job_type AND j.priority = p_lane.priority
              AND j.run_at > v_began))::int;
END $$;

-- Stores what close_lane decided, without waiting.
CREATE OR REPLACE FUNCTION store_closing(p_lane lanes, p_closing int) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    v_row tid;
BEGIN
    IF p_closing = p_lane.closing THEN
        RETURN;
    END IF;
    SELECT l.ctid INTO v_row
    FROM lanes AS l
    WHERE l.queue = p_lane.queue AND l.job_type = p_lane.job_type AND l.priority = p_lane.priority
      AND l.twin = p_lane.twin
    FOR UPDATE SKIP LOCKED;
    IF p_closing = 3 THEN
        DELETE FROM lanes AS l WHERE l.ctid = v_row;
    ELSE
        UPDATE lanes AS l SET closing = p_closing WHERE l.ctid = v_row;
    END IF;
END $$;
