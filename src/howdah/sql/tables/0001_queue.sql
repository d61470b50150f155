-- The relations of the queue: domains, tables, indexes, the view, triggers and seed rows.
-- oldest code: 1
--
-- Table steps run once and are not edited after a release. Functions have no versions: sql/functions/ holds the
-- current text of each.
--
-- Table steps and functions run with search_path set to the schema of this queue and nothing else, and every
-- function pins that path, so no name is looked up in another schema. A function whose body is RETURN needs no
-- pin: its names are resolved when it is created, and it can be inlined.
--
-- Functions of the contract are SECURITY DEFINER, and none is executable by PUBLIC: a role needs no privilege
-- on any table, only those of sql/access/grants.sql (decision 0015). Internal functions run with the
-- privileges of their caller. Functions of the contract turn JIT compilation off, for the functions that they
-- call too: it takes longer than any of their statements.

-- The schema versions that were applied. oldest_code: the oldest version whose code works with this schema
-- (decision 0006). functions_hash: the functions that were installed last. catalog: what the schema contained
-- then; `howdah migrate --check` compares it with what the schema contains now.
CREATE TABLE migrations (
    version        int         NOT NULL CONSTRAINT migrations_pkey PRIMARY KEY,
    name           text        NOT NULL,
    oldest_code    int         NOT NULL,
    functions_hash text        NOT NULL,
    catalog        jsonb       NOT NULL DEFAULT '{}',
    applied_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The limits of a new job's fields are domains, which check a value when it is assigned. Every statement that
-- inserts or updates a row reads, prepares and evaluates a table's CHECK constraints, whatever columns it
-- assigns: eighteen of them took 80 microseconds of a claim of one job.
--
-- Every text in an index is COLLATE "C": comparing bytes is fast, and an update of the operating system cannot
-- change the order under an index, after which a unique index would accept a key twice (decision 0023).
CREATE DOMAIN queue_name AS text COLLATE "C"
    CONSTRAINT queue_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN job_type_name AS text COLLATE "C"
    CONSTRAINT job_type_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN job_priority AS int
    CONSTRAINT priority_range CHECK (VALUE BETWEEN -1000 AND 1000);
CREATE DOMAIN attempt_limit AS int
    CONSTRAINT max_attempts_range CHECK (VALUE BETWEEN 1 AND 10000);
-- Within the range that every client can read: one job outside it would break the list of all jobs.
CREATE DOMAIN due_time AS timestamptz
    CONSTRAINT run_at_is_finite CHECK (isfinite(VALUE) AND VALUE < timestamptz '9999-01-01 00:00+00');
CREATE DOMAIN retention AS interval
    CONSTRAINT keep_is_positive CHECK (VALUE BETWEEN interval '0' AND interval '1000 years');
-- A larger payload belongs in a table or a bucket, with a reference to it in the job. The limit counts bytes of
-- JSON without the spaces that PostgreSQL prints, as a client that sends JSON counts them. The binary size is
-- known without converting to text, so small payloads do not pay for the conversion.
CREATE DOMAIN job_data AS jsonb
    CONSTRAINT data_within_limit CHECK (
        pg_column_size(VALUE) <= 8192
        OR octet_length(replace(replace(VALUE::text, ', ', ','), ': ', ':')) <= 65536)
    CONSTRAINT data_not_too_deep CHECK (
        pg_column_size(VALUE) <= 800 OR NOT jsonb_path_exists(VALUE, '$.**{101}'));
CREATE DOMAIN request_name AS text COLLATE "C"
    CONSTRAINT request_id_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN trace_name AS text COLLATE "C"
    CONSTRAINT traceparent_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN idempotency_name AS text COLLATE "C"
    CONSTRAINT idempotency_key_length CHECK (length(VALUE) BETWEEN 1 AND 500);
CREATE DOMAIN ordering_name AS text COLLATE "C"
    CONSTRAINT ordering_key_length CHECK (length(VALUE) BETWEEN 1 AND 500);

-- Jobs that are not finished (decision 0001). Small and hot: fillfactor 70 leaves room for HOT updates.
CREATE TABLE live_jobs (
    id               uuid             NOT NULL,
    seq              bigint           NOT NULL GENERATED ALWAYS AS IDENTITY,
    run_at           due_time         NOT NULL DEFAULT clock_timestamp(),
    created_at       timestamptz      NOT NULL DEFAULT clock_timestamp(),
    claimed_at       timestamptz,
    started_at       timestamptz,
    lease_id         uuid,  -- the fence; of a claimed job, its row in leases
    priority         job_priority     NOT NULL DEFAULT 100,
    attempts         int              NOT NULL DEFAULT 0,
    max_attempts     attempt_limit    NOT NULL DEFAULT 3,
    claims           int              NOT NULL DEFAULT 0,
    events_count     int              NOT NULL DEFAULT 0,
    blockers         int              NOT NULL DEFAULT 0,
    progress         smallint         NOT NULL DEFAULT 0,
    holds_key        boolean          NOT NULL DEFAULT false,
    cancel_requested boolean          NOT NULL DEFAULT false,
    status           text             NOT NULL DEFAULT 'pending',
    queue            queue_name       NOT NULL DEFAULT 'default',
    job_type         job_type_name    NOT NULL,
    data             job_data         NOT NULL DEFAULT '{}',
    current_stage    text,
    worker_id        text,
    last_error       text,
    request_id       request_name,
    traceparent      trace_name,
    idempotency_key  idempotency_name,
    ordering_key     ordering_name,
    keep             retention,
    last_event       bigint,  -- the number of the last event of its runs, so that none is written twice
    CONSTRAINT live_jobs_pkey PRIMARY KEY (id),
    -- The status of the view jobs: the planner then knows that a search for finished jobs need not read live ones.
    CONSTRAINT live_status CHECK (
        CASE WHEN status = 'claimed' AND started_at IS NOT NULL THEN 'running' ELSE status END
            IN ('pending', 'claimed', 'running'))
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX live_jobs_pending ON live_jobs (queue, job_type, priority DESC, run_at, id)
    WHERE status = 'pending' AND blockers = 0;
-- One index finds a key's holder and the next job of the key (decision 0003).
CREATE INDEX live_jobs_ordered ON live_jobs (ordering_key, holds_key, seq)
    WHERE ordering_key IS NOT NULL;
-- The oldest live job of every 32nd of all keys, for key_floors. No search by key implies its condition, so the planner
-- cannot use it for one.
CREATE INDEX live_jobs_key_floor ON live_jobs ((hashtextextended(ordering_key::text, 0) & 31), seq)
    WHERE (hashtextextended(ordering_key::text, 0) & 31) IS NOT NULL;

-- One row for each claim: until when its jobs are its worker's. A heartbeat extends the lease and writes no job, so that
-- it costs the same for one job and for thousands, and meets no lock on a job (decision 0045). The fence of a job is in
-- its own row. A lease stays until its jobs have ended or were taken from it: then the acknowledgement of the last one
-- removes it, or a heartbeat of its worker, or recovery when it has expired.
CREATE TABLE leases (
    lease_id    uuid        NOT NULL CONSTRAINT leases_pkey PRIMARY KEY,
    worker_id   text        COLLATE "C" NOT NULL,
    claimed_at  timestamptz NOT NULL,
    written_at  timestamptz NOT NULL,  -- when expires_at was set
    expires_at  timestamptz NOT NULL,
    is_excused  boolean     NOT NULL DEFAULT false,  -- by recovery, since the last heartbeat (decision 0042)
    job_ids     uuid[]      NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX leases_expired ON leases (expires_at);

-- Finished jobs, partitioned by the day on which they may be dropped: retention drops a partition and does not
-- delete rows (decision 0001).
CREATE TABLE finished_jobs (
    id               uuid        NOT NULL,
    seq              bigint      NOT NULL,
    run_at           timestamptz NOT NULL,
    created_at       timestamptz NOT NULL,
    claimed_at       timestamptz,
    started_at       timestamptz,
    completed_at     timestamptz NOT NULL,
    drop_on          date        NOT NULL,
    lease_id         uuid,
    priority         int         NOT NULL,
    attempts         int         NOT NULL,
    max_attempts     int         NOT NULL,
    claims           int         NOT NULL,
    events_count     int         NOT NULL,
    progress         smallint    NOT NULL,
    cancel_requested boolean     NOT NULL,
    status           text        NOT NULL
        CONSTRAINT status_is_final CHECK (status IN ('completed', 'failed', 'cancelled')),
    queue            text        COLLATE "C" NOT NULL,
    job_type         text        COLLATE "C" NOT NULL,
    data             jsonb       NOT NULL,
    current_stage    text,
    worker_id        text,
    last_error       text,
    request_id       text        COLLATE "C",
    traceparent      text        COLLATE "C",
    idempotency_key  text        COLLATE "C",
    ordering_key     text        COLLATE "C",
    keep             interval,
    result           jsonb,
    last_event       bigint,
    CONSTRAINT finished_jobs_pkey PRIMARY KEY (id, drop_on)
) PARTITION BY RANGE (drop_on);

CREATE INDEX finished_jobs_unsuccessful ON finished_jobs (id) WHERE status <> 'completed';

-- Rows of a day that has no partition. The index finds their days and the expired among them.
CREATE TABLE finished_jobs_default PARTITION OF finished_jobs DEFAULT;
CREATE INDEX finished_jobs_default_day ON finished_jobs_default (drop_on);

-- Jobs that are kept for less than a day. They are deleted in batches within minutes of their time, which the
-- index has in an immutable form (decision 0035).
CREATE TABLE finished_jobs_short PARTITION OF finished_jobs
    FOR VALUES FROM (MINVALUE) TO ('1970-01-02')
    WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000,
          autovacuum_vacuum_cost_delay = 0);
CREATE INDEX finished_jobs_short_expired ON finished_jobs_short (((completed_at AT TIME ZONE 'UTC') + keep));

-- Every (queue, job type, priority) in use. A claim searches each lane's range of the index, from its head on. A
-- twin is a second row of a lane, added while the first is in a transaction that is still open, or is closing.
CREATE TABLE lanes (
    queue    text COLLATE "C" NOT NULL,
    job_type text COLLATE "C" NOT NULL,
    priority int              NOT NULL,
    twin     boolean          NOT NULL DEFAULT false,
    number   int              NOT NULL GENERATED BY DEFAULT AS IDENTITY,
    closing  int              NOT NULL DEFAULT 0,  -- steps towards its removal (decision 0032)
    CONSTRAINT lanes_pkey PRIMARY KEY (queue, job_type, priority, twin)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- What the last sweep found (decision 0031). It has one row, the newest; each sweep adds a row and removes the one
-- before: the search for the newest row reads no dead ones, and of a row that is updated it would read every version
-- that an open transaction keeps.
CREATE TABLE sweeps (
    id         bigint   NOT NULL GENERATED BY DEFAULT AS IDENTITY CONSTRAINT sweeps_pkey PRIMARY KEY,
    -- The transactions that had written jobs and were open, each with the last sweep before it was found.
    writers    jsonb    NOT NULL,
    kept_sweeps bigint[] NOT NULL,      -- this one, and those of the writers
    seqs       bigint[] NOT NULL,       -- for each of them, the last seq that was given to a job before it
    lanes      int[]    NOT NULL,       -- the numbers of the lanes
    heads      timestamptz[] NOT NULL,  -- for each of the sweeps, the heads of the lanes before it
    quiet      int[]    NOT NULL,       -- for each lane, how many sweeps in a row, up to two, found no due job
    used       timestamptz[] NOT NULL,  -- for each lane, about when a sweep found one
    -- The heads of the lanes, by their numbers modulo 256: the least of those that share one. Claims read this one row,
    -- and no versions of lanes.
    raised     timestamptz[] NOT NULL,
    key_floors bigint[] NOT NULL        -- for every 32nd of all ordering keys: no live job has a lower seq
);

-- Keys belong to their job type. data_hash is that of the first job's data (jsonb_hash_extended): the same key
-- with other data is refused, also when the first job is gone (decision 0033).
CREATE TABLE idempotency_keys (
    job_type   text        COLLATE "C" NOT NULL,
    key        text        COLLATE "C" NOT NULL,
    job_id     uuid        NOT NULL,
    data_hash  bigint      NOT NULL,
    expires_at timestamptz NOT NULL,
    holding_id uuid        NOT NULL DEFAULT gen_random_uuid(),  -- new each time that the key is taken
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (job_type, key),
    CONSTRAINT key_length CHECK (length(key) BETWEEN 1 AND 500)
);
CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at);
CREATE INDEX idempotency_keys_job ON idempotency_keys (job_id);

-- Holdings of keys that have ended: such a key is free. Not unique, so that adding a row waits for nobody. `prune`
-- removes the rows and their keys.
CREATE TABLE freed_keys (
    holding_id uuid NOT NULL,
    job_id     uuid NOT NULL
);
CREATE INDEX freed_keys_holding ON freed_keys (holding_id);
-- Every table has a primary key or this: PostgreSQL refuses to delete from a published table that has neither.
ALTER TABLE freed_keys REPLICA IDENTITY FULL;

-- Ordering keys whose next holder could not be decided without waiting for another transaction.
CREATE TABLE unassigned_keys (
    id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT unassigned_keys_pkey PRIMARY KEY,
    ordering_key text   COLLATE "C" NOT NULL
);
CREATE INDEX unassigned_keys_key ON unassigned_keys (ordering_key);

-- The durable event stream of each job, counted by events_count. Partitioned by the day on which the events may
-- be dropped, which follows from the job, so that one partition holds all events of a job (decision 0035).
CREATE SEQUENCE job_event_ids;
CREATE TABLE job_events (
    job_id   uuid        NOT NULL,
    event_id bigint      NOT NULL DEFAULT nextval('job_event_ids'),
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt  int         NOT NULL,
    drop_on  date        NOT NULL,
    kind     text        NOT NULL CONSTRAINT kind_length CHECK (length(kind) BETWEEN 1 AND 100),
    data     jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT job_events_pkey PRIMARY KEY (job_id, event_id, drop_on)
) PARTITION BY RANGE (drop_on);
ALTER SEQUENCE job_event_ids OWNED BY job_events.event_id;

CREATE TABLE job_events_default PARTITION OF job_events DEFAULT;
CREATE INDEX job_events_default_day ON job_events_default (drop_on);

-- One row for each life of a worker: two processes may have one worker_id, as in a rolling replacement, and
-- neither may write or remove the row of the other (decision 0037). SQL callers that name no life have one.
CREATE TABLE workers (
    worker_id  text        COLLATE "C" NOT NULL,
    life       uuid        NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    host       text        NOT NULL,
    pid        int         NOT NULL,
    queues     text[]      NOT NULL,
    job_types  text[]      NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    idle       boolean     NOT NULL DEFAULT false,
    info       jsonb       NOT NULL DEFAULT '{}',
    full_types text[]      NOT NULL DEFAULT '{}',  -- of job_types: those without a free slot, although idle
    CONSTRAINT workers_pkey PRIMARY KEY (worker_id, life)
) WITH (fillfactor = 50);
-- In an order without meaning: a search from a random place finds a random worker (decision 0039).
CREATE INDEX workers_idle ON workers (hashtextextended(worker_id, 0)) WHERE idle;

-- Clients that want notifications of a job's changes. Usually empty, and then no job causes a NOTIFY
-- (decision 0010).
CREATE TABLE watchers (
    job_id  uuid        NOT NULL,
    watcher text        COLLATE "C" NOT NULL,
    until   timestamptz NOT NULL,
    CONSTRAINT watchers_pkey PRIMARY KEY (job_id, watcher)
) WITH (fillfactor = 50);
CREATE INDEX watchers_expired ON watchers (until);

-- The duties. The transaction that moves due_at forward runs that tick of the duty. 'infinity' switches a duty
-- off.
CREATE TABLE maintenance (
    duty        text        COLLATE "C" NOT NULL CONSTRAINT maintenance_pkey PRIMARY KEY,
    rank        int         NOT NULL,
    period      interval    NOT NULL,
    spacing     int         NOT NULL DEFAULT 0,  -- the next run is at least this many times `took` later
    due_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_run_at timestamptz,
    took        interval,
    last_error  text,
    reached     timestamptz NOT NULL DEFAULT '-infinity',  -- up to where the duty has read (decision 0005)
    -- Retention: what expired before `reached` may go. It follows `observed`, an earlier reading of the clock.
    observed    timestamptz NOT NULL DEFAULT '-infinity',
    state       jsonb       NOT NULL DEFAULT '{}'          -- what else a duty remembers for its next run
) WITH (fillfactor = 50);

-- The roles that were granted privileges here, by kind: every migration grants them what it adds.
CREATE TABLE grants (
    kind text COLLATE "C" NOT NULL CONSTRAINT kind_of_role CHECK (kind IN ('producer', 'worker', 'observer')),
    role text COLLATE "C" NOT NULL,
    CONSTRAINT grants_pkey PRIMARY KEY (kind, role)
);

-- Counts per ten seconds, life of a worker, queue and job type. Each writes its own with its heartbeat, so no
-- reader has to count finished jobs (decision 0012).
CREATE TABLE throughput (
    bucket      timestamptz NOT NULL,
    worker_id   text        COLLATE "C" NOT NULL,
    life        uuid        NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    queue       text        COLLATE "C" NOT NULL,
    job_type    text        COLLATE "C" NOT NULL,
    completed   int         NOT NULL DEFAULT 0,
    failed      int         NOT NULL DEFAULT 0,
    retried     int         NOT NULL DEFAULT 0,
    cancelled   int         NOT NULL DEFAULT 0,
    wait_seconds float8     NOT NULL DEFAULT 0,  -- the sum of the times from due to claimed
    run_seconds  float8     NOT NULL DEFAULT 0,
    CONSTRAINT throughput_pkey PRIMARY KEY (bucket, queue, job_type, worker_id, life)
) WITH (fillfactor = 70);

-- The relation for users: every job, live or finished, with the six statuses of the contract. Both halves have
-- the same types and collations, column by column: only then is the UNION ALL flattened, so that
-- ORDER BY id DESC LIMIT 50 reads the ends of the primary keys and not the whole history.
CREATE VIEW jobs AS
SELECT id, seq, queue::text, job_type::text, priority::int,
       CASE WHEN status = 'claimed' AND started_at IS NOT NULL THEN 'running' ELSE status END AS status,
       data::jsonb, progress, current_stage, events_count,
       worker_id, lease_id,
       (SELECT l.expires_at FROM leases AS l WHERE l.lease_id = live_jobs.lease_id) AS lease_expires_at,
       claims, claimed_at,
       run_at::timestamptz, created_at, started_at, NULL::timestamptz AS completed_at,
       attempts, max_attempts::int, last_error, request_id::text, traceparent::text,
       idempotency_key::text, ordering_key::text, holds_key, blockers, cancel_requested, keep::interval,
       NULL::jsonb AS result
FROM live_jobs
UNION ALL
SELECT id, seq, queue, job_type, priority,
       status,
       data, progress, current_stage, events_count,
       worker_id, lease_id, NULL::timestamptz, claims, claimed_at,
       run_at, created_at, started_at, completed_at,
       attempts, max_attempts, last_error, request_id, traceparent,
       idempotency_key, ordering_key, false, 0, cancel_requested, keep,
       result
FROM finished_jobs;

INSERT INTO maintenance (duty, rank, period, spacing)
VALUES ('recover', 10, '2 seconds', 0),
       ('keys', 20, '1 second', 0),
       ('sweep', 30, '500 milliseconds', 50),
       ('late', 32, '5 seconds', 20),
       ('clock', 35, '2 seconds', 0),
       ('prune', 40, '1 minute', 0),
       ('partitions', 90, '1 hour', 0);
-- The first reading of the clock: keys that expire before the next one are free as well.
UPDATE maintenance SET reached = clock_timestamp(), observed = clock_timestamp() WHERE duty = 'prune';

-- after functions

CREATE CONSTRAINT TRIGGER live_jobs_assign_key
    AFTER INSERT ON live_jobs
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW
    WHEN (NEW.blockers > 0 AND NEW.ordering_key IS NOT NULL)
    EXECUTE FUNCTION assign_key_at_commit();
-- Also while session_replication_role is `replica`, as in bulk imports: a job without its key would never run.
ALTER TABLE live_jobs ENABLE ALWAYS TRIGGER live_jobs_assign_key;

CREATE CONSTRAINT TRIGGER maintenance_partitions
    AFTER UPDATE OF last_run_at ON maintenance
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW
    WHEN (NEW.duty = 'partitions')
    EXECUTE FUNCTION maintain_partitions_at_commit();
ALTER TABLE maintenance ENABLE ALWAYS TRIGGER maintenance_partitions;

CREATE TRIGGER jobs_insert INSTEAD OF INSERT ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_insert();
CREATE TRIGGER jobs_refuse INSTEAD OF UPDATE OR DELETE ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_refuse();

-- A row that a producer copies or inserts directly must not have the id of a finished job. An id that was made
-- within the last minute is not looked up, as most are, nor those of our functions, which look up ids themselves.
CREATE TRIGGER live_jobs_refuse_finished
    AFTER INSERT ON live_jobs
    FOR EACH ROW
    WHEN (abs(('x' || translate(left(NEW.id::text, 13), '-', ''))::bit(48)::bigint / 1000
              - extract(epoch FROM clock_timestamp())) > 60
          AND NOT has_table_privilege('live_jobs'::regclass, 'DELETE'))
    EXECUTE FUNCTION refuse_finished_id();
ALTER TABLE live_jobs ENABLE ALWAYS TRIGGER live_jobs_refuse_finished;

-- PostgreSQL cannot enable a view's trigger for that role: an INSERT would do nothing and say nothing. The default
-- of a column that nobody fills refuses it.
ALTER VIEW jobs ALTER COLUMN seq SET DEFAULT refuse_replica_role();

-- A restore of data alone finds the rows that this migration wrote (restoring.sql).
CREATE TRIGGER migrations_restore BEFORE INSERT ON migrations
    FOR EACH ROW EXECUTE FUNCTION skip_existing_row();
CREATE TRIGGER maintenance_restore BEFORE INSERT ON maintenance
    FOR EACH ROW EXECUTE FUNCTION skip_existing_row();
CREATE TRIGGER grants_restore BEFORE INSERT ON grants
    FOR EACH ROW EXECUTE FUNCTION skip_existing_row();
CREATE TRIGGER lanes_restore BEFORE INSERT ON lanes
    FOR EACH ROW EXECUTE FUNCTION skip_existing_row();
CREATE TRIGGER sweeps_restore BEFORE INSERT ON sweeps
    FOR EACH ROW EXECUTE FUNCTION skip_existing_row();

SELECT maintain_partitions();
