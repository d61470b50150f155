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
-- privileges of their caller.

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
    lease_expires_at timestamptz,
    lease_id         uuid,
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
    CONSTRAINT live_jobs_pkey PRIMARY KEY (id),
    -- One constraint for all conditions, for the reason given at the domains.
    CONSTRAINT consistent CHECK (
        (status = 'pending' AND lease_id IS NULL OR status = 'claimed' AND lease_id IS NOT NULL)
        AND attempts BETWEEN 0 AND max_attempts AND claims >= attempts
        AND progress BETWEEN 0 AND 100 AND blockers >= 0)
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX live_jobs_pending ON live_jobs (queue, job_type, priority DESC, run_at, id)
    WHERE status = 'pending' AND blockers = 0;
CREATE INDEX live_jobs_claimed ON live_jobs (queue, job_type, lease_expires_at)
    WHERE status = 'claimed';
-- One index finds a key's holder and the next job of the key (decision 0003).
CREATE INDEX live_jobs_ordered ON live_jobs (ordering_key, holds_key, seq)
    WHERE ordering_key IS NOT NULL;

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
    queue            text        NOT NULL,
    job_type         text        NOT NULL,
    data             jsonb       NOT NULL,
    current_stage    text,
    worker_id        text,
    last_error       text,
    request_id       text,
    traceparent      text,
    idempotency_key  text,
    ordering_key     text,
    keep             interval,
    result           jsonb,
    CONSTRAINT finished_jobs_pkey PRIMARY KEY (id, drop_on)
) PARTITION BY RANGE (drop_on);

CREATE INDEX finished_jobs_unsuccessful ON finished_jobs (id) WHERE status <> 'completed';

CREATE TABLE finished_jobs_default PARTITION OF finished_jobs DEFAULT;

-- Every (queue, job type, priority) ever used. A claim searches each lane's range of the index, from head_at
-- on. A twin is a second row of a lane, added by sweep_lanes while the first is in a transaction that is still
-- open.
CREATE TABLE lanes (
    queue    text COLLATE "C" NOT NULL,
    job_type text COLLATE "C" NOT NULL,
    priority int              NOT NULL,
    twin     boolean          NOT NULL DEFAULT false,
    head_at  timestamptz      NOT NULL DEFAULT '-infinity',  -- no pending job is due earlier
    CONSTRAINT lanes_pkey PRIMARY KEY (queue, job_type, priority, twin)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE idempotency_keys (
    key        text        COLLATE "C" NOT NULL CONSTRAINT idempotency_keys_pkey PRIMARY KEY,
    job_id     uuid        NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT key_length CHECK (length(key) BETWEEN 1 AND 500)
);
CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at);

-- Ordering keys whose next holder could not be decided without waiting for another transaction.
CREATE TABLE unassigned_keys (
    id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT unassigned_keys_pkey PRIMARY KEY,
    ordering_key text   NOT NULL
);

-- The durable event stream of each job, counted by events_count.
CREATE TABLE job_events (
    job_id   uuid        NOT NULL,
    event_id bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt  int         NOT NULL,
    kind     text        NOT NULL CONSTRAINT kind_length CHECK (length(kind) BETWEEN 1 AND 100),
    data     jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT job_events_pkey PRIMARY KEY (job_id, event_id)
);
CREATE INDEX job_events_at ON job_events USING brin (at);

CREATE TABLE workers (
    worker_id  text        COLLATE "C" NOT NULL CONSTRAINT workers_pkey PRIMARY KEY,
    host       text        NOT NULL,
    pid        int         NOT NULL,
    queues     text[]      NOT NULL,
    job_types  text[]      NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    idle       boolean     NOT NULL DEFAULT false,
    info       jsonb       NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
CREATE INDEX workers_idle ON workers (worker_id) WHERE idle;

-- Clients that want notifications of a job's changes. Usually empty, and then no job causes a NOTIFY
-- (decision 0010).
CREATE TABLE watchers (
    job_id  uuid        NOT NULL,
    watcher text        COLLATE "C" NOT NULL,
    until   timestamptz NOT NULL,
    CONSTRAINT watchers_pkey PRIMARY KEY (job_id, watcher)
) WITH (fillfactor = 50);

-- The duties. The transaction that moves due_at forward runs that tick of the duty.
CREATE TABLE maintenance (
    duty        text        COLLATE "C" NOT NULL CONSTRAINT maintenance_pkey PRIMARY KEY,
    rank        int         NOT NULL,
    period      interval    NOT NULL,
    spacing     int         NOT NULL DEFAULT 0,  -- the next run is at least this many times `took` later
    due_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_run_at timestamptz,
    took        interval,
    last_error  text,
    reached     timestamptz NOT NULL DEFAULT '-infinity'  -- where the next recovery starts (decision 0005)
) WITH (fillfactor = 50);

-- The roles that were granted privileges here, by kind: every migration grants them what it adds.
CREATE TABLE grants (
    kind text COLLATE "C" NOT NULL CONSTRAINT kind_of_role CHECK (kind IN ('producer', 'worker', 'observer')),
    role text COLLATE "C" NOT NULL,
    CONSTRAINT grants_pkey PRIMARY KEY (kind, role)
);

-- Counts per ten seconds, worker, queue and job type. Each worker writes its own with its heartbeat, so no
-- reader has to count finished jobs (decision 0012).
CREATE TABLE throughput (
    bucket      timestamptz NOT NULL,
    worker_id   text        COLLATE "C" NOT NULL,
    queue       text        COLLATE "C" NOT NULL,
    job_type    text        COLLATE "C" NOT NULL,
    completed   int         NOT NULL DEFAULT 0,
    failed      int         NOT NULL DEFAULT 0,
    retried     int         NOT NULL DEFAULT 0,
    cancelled   int         NOT NULL DEFAULT 0,
    wait_seconds float8     NOT NULL DEFAULT 0,  -- the sum of the times from due to claimed
    run_seconds  float8     NOT NULL DEFAULT 0,
    CONSTRAINT throughput_pkey PRIMARY KEY (bucket, queue, job_type, worker_id)
) WITH (fillfactor = 70);

-- The relation for users: every job, live or finished, with the six statuses of the contract.
CREATE VIEW jobs AS
SELECT id, seq, queue, job_type, priority,
       CASE WHEN status = 'claimed' AND started_at IS NOT NULL THEN 'running' ELSE status END AS status,
       data, progress, current_stage, events_count,
       worker_id, lease_id, lease_expires_at, claims, claimed_at,
       run_at, created_at, started_at, NULL::timestamptz AS completed_at,
       attempts, max_attempts, last_error, request_id, traceparent,
       idempotency_key, ordering_key, holds_key, blockers, cancel_requested, keep,
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
       ('sweep', 30, '5 seconds', 20),
       ('prune', 40, '1 minute', 0),
       ('partitions', 90, '1 hour', 0);

-- after functions

CREATE CONSTRAINT TRIGGER live_jobs_assign_key
    AFTER INSERT ON live_jobs
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW
    WHEN (NEW.blockers > 0 AND NEW.ordering_key IS NOT NULL)
    EXECUTE FUNCTION assign_key_at_commit();

CREATE TRIGGER jobs_insert INSTEAD OF INSERT ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_insert();
CREATE TRIGGER jobs_refuse INSTEAD OF UPDATE OR DELETE ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_view_refuse();

SELECT maintain_partitions();
