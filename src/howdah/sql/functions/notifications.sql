-- Notifications: wake idle workers, tell workers of cancellations and watchers of changes.
--
-- Owns the table watchers and the channels SCHEMA:wake, SCHEMA:cancel and SCHEMA:job. NOTIFY serializes
-- commits, so every notification has a condition. None is needed for correctness: listeners also poll.

-- Notifies idle workers of due jobs, once per statement.
CREATE OR REPLACE FUNCTION wake_workers(p_lanes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    -- A killed worker cannot clear its idle flag: the flag is ignored after a minute.
    IF p_lanes IS NOT NULL AND EXISTS (
        SELECT FROM workers WHERE idle AND seen_at > clock_timestamp() - interval '1 minute')
    THEN
        PERFORM pg_notify(current_schema() || ':wake',
                          CASE WHEN octet_length(p_lanes::text) < 7000 THEN p_lanes::text ELSE '[]' END);
    END IF;
END $$;

-- Notifies the watchers of these jobs of a change. The notification carries the id; watchers read the job.
CREATE OR REPLACE FUNCTION notify_watchers(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM watchers) THEN
        PERFORM pg_notify(current_schema() || ':job', t.job_id::text)
        FROM (SELECT DISTINCT w.job_id FROM watchers AS w WHERE w.job_id = ANY (p_ids)) AS t;
    END IF;
END $$;

-- Notifies the workers that run these jobs to check their leases now: a job was cancelled or taken over.
CREATE OR REPLACE FUNCTION notify_cancellation(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF p_ids <> '{}' THEN
        PERFORM pg_notify(current_schema() || ':cancel',
                          CASE WHEN cardinality(p_ids) <= 150 THEN to_json(p_ids)::text ELSE '[]' END);
    END IF;
END $$;

-- Requests notifications on the channel SCHEMA:job of every change to these jobs for a while (decision
-- 0010).
CREATE OR REPLACE FUNCTION watch_jobs(p_watcher text, p_ids uuid[], p_for interval DEFAULT '1 minute')
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    INSERT INTO watchers (job_id, watcher, until)
    SELECT i, left(p_watcher, 200), clock_timestamp() + p_for
    FROM unnest(p_ids) AS i
    ORDER BY i
    ON CONFLICT (job_id, watcher) DO UPDATE SET until = excluded.until
$$;

CREATE OR REPLACE FUNCTION unwatch_jobs(p_watcher text, p_ids uuid[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$ DELETE FROM watchers WHERE watcher = left(p_watcher, 200) AND job_id = ANY (p_ids) $$;
