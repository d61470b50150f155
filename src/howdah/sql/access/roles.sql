-- Makes the roles that get privileges on the schema that howdah.schema names. The setting howdah.roles names them:
-- {"producer": ["web"], ...}. If it is empty: the roles that are recorded already, which are in howdah.result as
-- [[kind, role], ...], or else four group roles, which are created and named after the schema. A role that is not
-- named loses its privileges; the administrator becomes the owner of the schema (decision 0015). The roles to record
-- are left in howdah.granted.
--
-- Runs with the privileges of the caller and search_path set to pg_catalog, after find_owner.sql. It reads catalogs only,
-- and no table or function of the schema (decision 0036).
DO $roles$
DECLARE
    v_schema text := current_setting('howdah.schema');
    v_recorded jsonb := coalesce(nullif(current_setting('howdah.result'), '')::jsonb, '[]');
    v_requested jsonb := nullif(current_setting('howdah.roles'), '')::jsonb;
    v_create boolean := v_requested IS NULL;
    v_owner name := current_setting('howdah.owner');
    v_named_owner name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace AS n WHERE n.nspname = v_schema);
    v_administrator name;
    v_role text;
    v_object record;
BEGIN
    PERFORM set_config('howdah.granted', v_recorded::text, true);
    IF v_requested IS NULL AND v_recorded <> '[]' THEN
        RETURN;
    END IF;
    IF v_requested IS NULL THEN
        SELECT jsonb_object_agg(k, jsonb_build_array(v_schema || '_' || k)) INTO v_requested
        FROM unnest('{producer,worker,observer,administrator}'::text[]) AS k;
    END IF;
    FOR v_role IN
        SELECT DISTINCT r FROM jsonb_each(v_requested) AS a, jsonb_array_elements_text(a.value) AS r
    LOOP
        IF EXISTS (SELECT FROM pg_roles AS known WHERE known.rolname = v_role) THEN
            CONTINUE;
        ELSIF v_create THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
        ELSE
            RAISE EXCEPTION 'role "%" does not exist', v_role USING ERRCODE = 'undefined_object';
        END IF;
    END LOOP;

    -- Functions run with the privileges of their owner: it should own this schema and nothing else.
    v_administrator := v_requested -> 'administrator' ->> 0;
    IF v_administrator <> v_named_owner THEN
        IF v_administrator ~ '^pg_' THEN
            RAISE EXCEPTION 'role "%" is reserved and cannot be the administrator', v_administrator
                USING ERRCODE = 'reserved_name';
        END IF;
        -- The previous owner becomes a member, and its code in the schema would run as the administrator.
        IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = v_administrator)
           AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = v_owner)
        THEN
            RAISE EXCEPTION 'role "%" is a superuser and cannot be the administrator of a schema of role "%"',
                            v_administrator, v_owner USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
        -- Since PostgreSQL 16 the role that creates another role is a member of it without SET.
        IF NOT pg_has_role(v_administrator, CASE WHEN current_setting('server_version_num')::int >= 160000
                                                 THEN 'SET' ELSE 'MEMBER' END)
        THEN
            EXECUTE format('GRANT %I TO %I', v_administrator, current_user);
        END IF;
        EXECUTE format('ALTER SCHEMA %I OWNER TO %I', v_schema, v_administrator);
        FOR v_object IN
            SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END AS kind, c.relname AS name
            FROM pg_class AS c
            WHERE c.relnamespace = quote_ident(v_schema)::regnamespace AND c.relkind IN ('r', 'p', 'v')
        LOOP
            EXECUTE format('ALTER %s %I.%I OWNER TO %I',
                           v_object.kind, v_schema, v_object.name, v_administrator);
        END LOOP;
        -- The owner of a domain can attach a check to it.
        FOR v_object IN
            SELECT t.oid::regtype AS name
            FROM pg_type AS t
            WHERE t.typnamespace = quote_ident(v_schema)::regnamespace AND t.typtype = 'd'
        LOOP
            EXECUTE format('ALTER DOMAIN %s OWNER TO %I', v_object.name, v_administrator);
        END LOOP;
        FOR v_object IN
            SELECT p.oid::regprocedure AS name
            FROM pg_proc AS p
            WHERE p.pronamespace = quote_ident(v_schema)::regnamespace
        LOOP
            EXECUTE format('ALTER FUNCTION %s OWNER TO %I', v_object.name, v_administrator);
        END LOOP;
        -- Programs that still connect as the previous owner must go on.
        IF NOT pg_has_role(v_owner, v_administrator, 'MEMBER') THEN
            EXECUTE format('GRANT %I TO %I', v_administrator, v_owner);
        END IF;
    END IF;

    FOR v_role IN
        SELECT DISTINCT g.role
        FROM (SELECT r ->> 0, r ->> 1 FROM jsonb_array_elements(v_recorded) AS r) AS g (kind, role)
        JOIN pg_roles AS known ON known.rolname = g.role
        WHERE g.role <> coalesce(v_administrator, v_owner)
          AND NOT coalesce(v_requested -> g.kind ? g.role, false)
    LOOP
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA %I FROM %I', v_schema, v_role);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM %I', v_schema, v_role);
        EXECUTE format('REVOKE ALL ON SCHEMA %I FROM %I', v_schema, v_role);
    END LOOP;
    PERFORM set_config('howdah.granted', (
        SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(a.key, r)), '[]')
        FROM jsonb_each(v_requested) AS a, jsonb_array_elements_text(a.value) AS r
        WHERE a.key <> 'administrator')::text, true);
END $roles$;
