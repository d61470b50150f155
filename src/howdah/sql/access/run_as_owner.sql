-- Runs the SQL in the setting howdah.script as the owner of the schema, and stores the text that it returns, if
-- howdah.returns is "text", in howdah.result. Runs with search_path set to pg_catalog, after find_owner.sql.
--
-- The role that migrates may have more privileges than the owner: a superuser, or a member of the owner's role. The
-- owner can attach code to its objects: triggers, functions with better matching parameters, casts, policies, index
-- predicates. SET ROLE does not confine such code, because it may RESET ROLE. REFRESH MATERIALIZED VIEW does: it runs
-- the query as the view's owner, in a security-restricted operation, which may not change roles, leave triggers or
-- cursors for the commit, create temporary objects or change settings (decision 0036).
--
-- After that code has run, nothing of the schema is evaluated here, as the code may have replaced the view. A text comes
-- back as the message of an error, which also undoes what the code did.
DO $run$
DECLARE
    v_schema text := current_setting('howdah.schema');
    v_owner name := nullif(current_setting('howdah.owner'), '');
    v_reads boolean := current_setting('howdah.returns') = 'text';
    -- The role that logged in: SET SESSION AUTHORIZATION changes session_user, and can be undone like SET ROLE.
    v_login name := (SELECT pg_get_userbyid(a.usesysid) FROM pg_stat_get_activity(pg_backend_pid()) AS a);
    v_is_member boolean := pg_has_role(v_owner, CASE WHEN current_setting('server_version_num')::int >= 160000
                                                     THEN 'SET' ELSE 'MEMBER' END);
    v_path text := format('%I, pg_temp', v_schema);
    v_name text := format('%I.howdah_migration', v_schema);
    v_view oid;
    v_result text;
BEGIN
    IF v_owner IS NULL OR (v_owner = current_user AND v_owner = session_user AND v_owner = v_login)
       -- A role that cannot act as the owner may read what was granted to it, as every client does.
       OR (NOT v_is_member AND current_setting('howdah.readers') = 'any')
    THEN
        PERFORM set_config('search_path', v_path, true);
        IF v_reads THEN
            EXECUTE current_setting('howdah.script') INTO v_result;
        ELSE
            EXECUTE current_setting('howdah.script');
        END IF;
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    ELSIF NOT v_is_member THEN
        RAISE EXCEPTION 'role "%" must be able to act as role "%", the owner of schema "%"',
                        current_user, v_owner, v_schema USING ERRCODE = 'insufficient_privilege';
    ELSE
        BEGIN
            EXECUTE format(
                'CREATE FUNCTION %s() RETURNS text LANGUAGE plpgsql AS %L', v_name,
                format('DECLARE v_result text; BEGIN PERFORM pg_catalog.set_config(%L, %L, true); '
                       'EXECUTE pg_catalog.current_setting(%L) %s; RETURN NULL; END',
                       'search_path', v_path, 'howdah.script',
                       CASE WHEN v_reads THEN 'INTO v_result; RAISE EXCEPTION USING ERRCODE = ''HW000'', '
                                              'MESSAGE = coalesce(v_result, '''')' END));
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s() TO %I', v_name, v_owner);
            EXECUTE format('CREATE MATERIALIZED VIEW %s AS SELECT %s() AS result WITH NO DATA', v_name, v_name);
            EXECUTE format('ALTER MATERIALIZED VIEW %s OWNER TO %I', v_name, v_owner);
            v_view := v_name::regclass;
            EXECUTE format('REFRESH MATERIALIZED VIEW %s', v_name);
            IF v_reads OR to_regclass(v_name)::oid IS DISTINCT FROM v_view THEN
                RAISE EXCEPTION 'schema "%" was altered by its own code while it was migrated', v_schema;
            END IF;
            EXECUTE format('DROP MATERIALIZED VIEW %s', v_name);
            EXECUTE format('DROP FUNCTION %s()', v_name);
        EXCEPTION WHEN SQLSTATE 'HW000' THEN
            GET STACKED DIAGNOSTICS v_result = MESSAGE_TEXT;
            IF NOT v_reads THEN
                RAISE EXCEPTION 'code in schema "%" stopped the migration: %', v_schema, v_result;
            END IF;
        END;
    END IF;
    PERFORM set_config('howdah.result', coalesce(v_result, ''), true);
END $run$;
