-- Grants the privileges of producers, workers and observers (decision 0015), with search_path set to the
-- schema. Runs as the schema's owner at the end of every migration and of `howdah migrate --grants`. It grants
-- what is missing and revokes only from PUBLIC: a privilege that was granted by hand stays.
DO $grants$
DECLARE
    v_right record;
BEGIN
    EXECUTE format('REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', current_schema());

    FOR v_right IN
        WITH rights (kinds, privilege, object, names) AS (VALUES
            ('{producer,worker,observer}'::text[], 'SELECT', 'TABLE', '{migrations}'::text[]),
            ('{producer,worker}', 'INSERT', 'TABLE', '{jobs}'),
            -- The columns that a bulk enqueue copies (decision 0014). The others keep their defaults: such
            -- a job is pending and due now.
            ('{producer,worker}',
             'INSERT (id, job_type, data, queue, priority, max_attempts, request_id, traceparent, keep)',
             'TABLE', '{live_jobs}'),
            ('{worker,observer}', 'SELECT', 'TABLE', '{jobs,job_events}'),
            ('{observer}', 'SELECT', 'TABLE',
             '{live_jobs,leases,finished_jobs,finished_jobs_default,job_events_default,lanes,
               idempotency_keys,freed_keys,unassigned_keys,workers,watchers,maintenance,throughput,grants}'),
            ('{producer,worker}', 'EXECUTE', 'FUNCTION', '{enqueue_job,enqueue_jobs,announce_jobs,refuse_replica_role}'),
            ('{worker,observer}', 'EXECUTE', 'FUNCTION', '{pending_count,next_due_at,get_jobs,get_events}'),
            ('{worker}', 'EXECUTE', 'FUNCTION',
             '{claim_job_batch,claim_runs,enqueue_and_claim,start_jobs,extend_jobs,report_progress,add_events,
               add_late_events,complete_jobs,complete_runs,fail_jobs,release_jobs,stop_jobs,held_jobs,watch_jobs,unwatch_jobs,
               register_worker,touch_worker,beat_worker,remove_worker,wake_channel,pass_wake,next_wake,
               recover_stale_jobs,run_maintenance,run_due_duty}')),
        existing (object, name) AS (
            SELECT 'TABLE', c.relname
            FROM pg_class AS c
            WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
            UNION ALL
            SELECT 'FUNCTION', p.proname
            FROM pg_proc AS p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace)
        SELECT r.privilege, r.object, e.name, g.role
        FROM grants AS g
        JOIN pg_roles AS known ON known.rolname = g.role  -- a role that was dropped is skipped
        JOIN rights AS r ON g.kind = ANY (r.kinds)
        JOIN existing AS e ON e.object = r.object AND e.name = ANY (r.names)
        ORDER BY r.object, e.name, r.privilege, g.role
    LOOP
        EXECUTE format('GRANT %s ON %s %I.%I TO %I', v_right.privilege, v_right.object,
                       current_schema(), v_right.name, v_right.role);
    END LOOP;
    FOR v_right IN
        SELECT DISTINCT g.role FROM grants AS g JOIN pg_roles AS known ON known.rolname = g.role
    LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), v_right.role);
    END LOOP;
END $grants$;
