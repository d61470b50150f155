-- Refuses a schema in which the code of other roles would run with the privileges of its owner: objects of roles that
-- may not act as the owner, their triggers (a privilege that GRANT ALL includes), and tables with foreign keys to ours,
-- whose triggers run with our statements. Runs with search_path set to pg_catalog, after find_owner.sql, and reads
-- catalogs only (decision 0036).
DO $others$
DECLARE
    v_schema text := current_setting('howdah.schema');
    v_owner name := nullif(current_setting('howdah.owner'), '');
    v_found record;
BEGIN
    -- Nobody attaches a trigger between this check and the statements that would fire it. The two tables are those
    -- whose rows a migration changes, and clients only read them.
    FOR v_found IN
        SELECT c.relname
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = v_schema AND c.relname IN ('grants', 'migrations') AND c.relkind = 'r'
          AND current_setting('howdah.returns') <> 'text' AND has_table_privilege(c.oid, 'UPDATE')
        ORDER BY c.relname
    LOOP
        EXECUTE format('LOCK TABLE %I.%I IN SHARE ROW EXCLUSIVE MODE', v_schema, v_found.relname);
    END LOOP;

    SELECT coalesce(quote_ident(r.rolname), 'every role') AS grantee, r.oid IS NULL AS is_everyone INTO v_found
    FROM pg_namespace AS n
    CROSS JOIN aclexplode(n.nspacl) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE n.nspname = v_schema AND a.privilege_type = 'CREATE'
      AND (r.oid IS NULL
           OR (SELECT o.rolsuper FROM pg_roles AS o WHERE o.rolname = v_owner)
               AND NOT pg_has_role(r.oid, v_owner, 'MEMBER'))
    ORDER BY r.oid IS NULL DESC, r.rolname
    LIMIT 1;
    IF v_found.is_everyone THEN
        RAISE EXCEPTION 'every role may create objects in schema "%"; use a separate schema for Howdah', v_schema
            USING ERRCODE = 'object_not_in_prerequisite_state';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'role % may create objects in schema "%", which belongs to a superuser',
                        v_found.grantee, v_schema
            USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = format('Run REVOKE CREATE ON SCHEMA %I FROM %s.', v_schema, v_found.grantee);
    END IF;

    SELECT o.object, pg_get_userbyid(o.owner) AS owner INTO v_found
    FROM pg_namespace AS n
    CROSS JOIN LATERAL (
        SELECT 'relation ' || c.oid::regclass, c.relowner FROM pg_class AS c WHERE c.relnamespace = n.oid
        UNION ALL
        SELECT 'function ' || p.oid::regprocedure, p.proowner FROM pg_proc AS p WHERE p.pronamespace = n.oid
        UNION ALL
        SELECT 'operator ' || o.oid::regoperator, o.oprowner FROM pg_operator AS o WHERE o.oprnamespace = n.oid
        UNION ALL
        SELECT 'type ' || t.oid::regtype, t.typowner FROM pg_type AS t WHERE t.typnamespace = n.oid
        UNION ALL
        SELECT format('the function of trigger %I on %s', t.tgname, c.oid::regclass), p.proowner
        FROM pg_class AS c
        JOIN pg_trigger AS t ON t.tgrelid = c.oid
        JOIN pg_proc AS p ON p.oid = t.tgfoid
        WHERE c.relnamespace = n.oid
        UNION ALL
        SELECT format('table %s, which refers to %s,', k.conrelid::regclass, c.oid::regclass), f.relowner
        FROM pg_class AS c
        JOIN pg_constraint AS k ON k.confrelid = c.oid AND k.contype = 'f'
        JOIN pg_class AS f ON f.oid = k.conrelid
        WHERE c.relnamespace = n.oid) AS o (object, owner)
    WHERE n.nspname = v_schema AND o.owner <> n.nspowner AND NOT pg_has_role(o.owner, v_owner, 'MEMBER')
    ORDER BY o.object
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% belongs to role "%", which may not act as the owner of schema "%", role "%"',
                        v_found.object, v_found.owner, v_schema, v_owner
            USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Its code would run with the privileges of the owner. Drop it, or change its owner.';
    END IF;
END $others$;
