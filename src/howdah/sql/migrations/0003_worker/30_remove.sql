-- Removes finished jobs, and their events, by id. What is not finished stays: cancel it first.
CREATE FUNCTION remove_jobs(p_ids uuid[]) RETURNS SETOF uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    WITH locked AS MATERIALIZED (
        SELECT f.id, f.drop_on
        FROM finished_jobs AS f
        WHERE f.id = ANY (p_ids)
        ORDER BY f.id
        FOR UPDATE),
    gone AS (
        DELETE FROM finished_jobs AS f
        USING locked AS l
        WHERE f.id = l.id AND f.drop_on = l.drop_on
        RETURNING f.id, f.events_count),
    silent AS (
        DELETE FROM job_events AS e
        USING gone AS g
        WHERE e.job_id = g.id AND g.events_count > 0)
    SELECT g.id FROM gone AS g
$$;
