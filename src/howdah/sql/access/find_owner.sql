-- Stores the owner of the schema that howdah.schema names in howdah.owner, empty if there is no such schema. Reads
-- catalogs only. pg_database_owner stands for the owner of the database: nobody can log in as it, nor add it to a role.
SELECT set_config('howdah.owner', coalesce((
    SELECT pg_get_userbyid(CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE n.nspowner END)
    FROM pg_namespace AS n, pg_database AS d
    WHERE n.nspname = current_setting('howdah.schema') AND d.datname = current_database()), ''), true);
