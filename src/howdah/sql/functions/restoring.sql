-- Restoring a dump.
--
-- `pg_dump --data-only` also contains the rows that a migration writes. COPY of a table stops at the first row that
-- exists, and loses the others.

-- Skips a row whose key exists: a schema that was migrated keeps its own rows.
CREATE OR REPLACE FUNCTION skip_existing_row() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT
AS $$
BEGIN
    CASE TG_TABLE_NAME
        WHEN 'migrations' THEN
            PERFORM FROM migrations AS m WHERE m.version = NEW.version;
        WHEN 'maintenance' THEN
            PERFORM FROM maintenance AS m WHERE m.duty = NEW.duty;
        WHEN 'grants' THEN
            PERFORM FROM grants AS g WHERE g.kind = NEW.kind AND g.role = NEW.role;
        WHEN 'sweeps' THEN
            PERFORM FROM sweeps AS s WHERE s.id = NEW.id;
        WHEN 'lanes' THEN
            PERFORM FROM lanes AS l
            WHERE l.queue = NEW.queue AND l.job_type = NEW.job_type AND l.priority = NEW.priority
              AND l.twin = NEW.twin;
    END CASE;
    RETURN CASE WHEN FOUND THEN NULL ELSE NEW END;
END $$;
