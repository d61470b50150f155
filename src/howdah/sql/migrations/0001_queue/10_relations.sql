-- The relations. Migrations run with search_path set to Howdah's own schema and nothing else, and every
-- function pins that path, so no name here is ever looked up anywhere else. A body that is written as
-- RETURN needs no pin: its names are looked up once, here, and it can still be inlined.
--
-- What callers call is SECURITY DEFINER, and nothing is executable by PUBLIC: a role needs no right on any
-- table, and has those of `grants.sql`. What only other functions call runs with the rights of its caller.

-- A payload larger than this belongs in a table or a bucket, with a reference to it in the job.
CREATE FUNCTION payload_limit() RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 65536;

-- UUIDv7 with the microsecond in its 12 spare bits, so that ids made here sort by their time.
CREATE FUNCTION new_job_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (
    SELECT (lpad(to_hex(t.us / 1000), 12, '0')
         || '7' || lpad(to_hex((t.us % 1000) * 4096 / 1000), 3, '0')
         || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS t);

-- The bounds of a new job's fields, as types: a domain looks at a value when it is assigned. A CHECK of the
-- table would be read, prepared and evaluated by every statement that inserts or updates a row, whatever it
-- assigns: eighteen of them took 80 µs of a claim of one job.
--
-- Every text that is in an index is COLLATE "C". Compared as bytes it is quick, and no update of the operating
-- system can change the order under an index: a unique one would then let a key in twice.
CREATE DOMAIN queue_name AS text COLLATE "C"
    CONSTRAINT queue_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN job_type_name AS text COLLATE "C"
    CONSTRAINT job_type_length CHECK (length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN job_priority AS int
    CONSTRAINT priority_range CHECK (VALUE BETWEEN -1000 AND 1000);
CREATE DOMAIN attempt_limit AS int
    CONSTRAINT max_attempts_range CHECK (VALUE BETWEEN 1 AND 10000);
-- Not beyond what every client can read: one such job would break the listing of all others.
CREATE DOMAIN due_time AS timestamptz
    CONSTRAINT run_at_is_finite CHECK (isfinite(VALUE) AND VALUE < timestamptz '9999-01-01 00:00+00');
CREATE DOMAIN retention AS interval
    CONSTRAINT keep_is_positive CHECK (VALUE BETWEEN interval '0' AND interval '1000 years');
-- The binary size is at hand, the text is not: small payloads never pay for the second half.
-- Measured without the blanks that PostgreSQL prints, as a client that sends JSON counts it.
CREATE DOMAIN job_data AS jsonb
    CONSTRAINT data_within_limit CHECK (
        pg_column_size(VALUE) <= 8192
        OR octet_length(replace(replace(VALUE::text, ', ', ','), ': ', ':')) <= payload_limit())
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

-- Jobs that are not finished. Small and hot: fillfactor 70 leaves room for HOT updates.
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
    -- In one, for the reason given above.
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
-- One index finds a key's holder (newest first) and its next in line (oldest first).
CREATE INDEX live_jobs_ordered ON live_jobs (ordering_key, holds_key, seq)
    WHERE ordering_key IS NOT NULL;

-- Finished jobs, by the day on which they may go: retention drops a leaf, it does not delete rows.
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

-- Which (queue, job type, priority) there are. A claim looks into each lane's range of the index.
-- A twin is a lane's second row, from the sweep: the first is in a transaction that is still open.
CREATE TABLE lanes (
    queue    text COLLATE "C" NOT NULL,
    job_type text COLLATE "C" NOT NULL,
    priority int              NOT NULL,
    twin     boolean          NOT NULL DEFAULT false,
    CONSTRAINT lanes_pkey PRIMARY KEY (queue, job_type, priority, twin)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE idempotency_keys (
    key        text        COLLATE "C" NOT NULL CONSTRAINT idempotency_keys_pkey PRIMARY KEY,
    job_id     uuid        NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT key_length CHECK (length(key) BETWEEN 1 AND 500)
);
CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at);

-- Ordering keys whose next holder could not be decided without waiting for somebody.
CREATE TABLE unsettled (
    id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT unsettled_pkey PRIMARY KEY,
    ordering_key text   NOT NULL
);

-- What happened to a job, in order: the durable stream behind events_count.
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

-- Who wants to hear of a job's changes at once. Usually empty: the gate before a NOTIFY per job.
CREATE TABLE watchers (
    job_id  uuid        NOT NULL,
    watcher text        COLLATE "C" NOT NULL,
    until   timestamptz NOT NULL,
    CONSTRAINT watchers_pkey PRIMARY KEY (job_id, watcher)
) WITH (fillfactor = 50);

-- Who moves due_at forward runs that tick of the duty.
CREATE TABLE maintenance (
    duty        text        COLLATE "C" NOT NULL CONSTRAINT maintenance_pkey PRIMARY KEY,
    rank        int         NOT NULL,
    period      interval    NOT NULL,
    spacing     int         NOT NULL DEFAULT 0,  -- at least this many times as long as it took
    due_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_run_at timestamptz,
    took        interval,
    last_error  text
) WITH (fillfactor = 50);

-- The roles that have been given rights here, as what: every migration gives them what it adds.
CREATE TABLE grants (
    kind text COLLATE "C" NOT NULL CONSTRAINT kind_of_role CHECK (kind IN ('producer', 'worker', 'observer')),
    role text COLLATE "C" NOT NULL,
    CONSTRAINT grants_pkey PRIMARY KEY (kind, role)
);

-- The relation users look at: every job, finished or not, with the six statuses of the contract.
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
