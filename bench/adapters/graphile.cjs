// Graphile Worker 0.18.0 on node-postgres.
//
// Settings, from "Performance" (worker.graphile.org/docs/performance): the configuration of its "quick stats", with 24
// concurrent jobs, a pool of 25, a local queue of 500 jobs, and completions and failures batched without delay.
// Every run also tries 100 concurrent jobs, for no-op jobs, I/O-bound jobs and pick-up latency, and uses the better
// value; the trials are listed below. Tried by hand on no-op jobs: a local queue of 1,000, delays of 5 and 25 ms (all
// within the spread), a local queue of 100 (slower). It deletes finished jobs and keeps no history. Bulk enqueues use
// `addJobs` (worker.graphile.org/docs/library/add-jobs) with 1,000 jobs per call.
//
// The verbs and events are those of driver.py. Handlers are counted in this process and written to the ledger.

"use strict";
const crypto = require("node:crypto");
const fs = require("node:fs");
const readline = require("node:readline");
const { setTimeout: sleep } = require("node:timers/promises");
const { Logger, makeWorkerUtils, run, runMigrations } = require("graphile-worker");
const { Pool } = require("pg");

const PROCESSES = 64; // counters before the start times in a ledger
const BATCH = 1000;
const now = () => process.hrtime.bigint(); // CLOCK_MONOTONIC, as in Python
const tell = (event, facts) => process.stdout.write(JSON.stringify({ event, ...facts }) + "\n");
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") process.stderr.write(message + "\n");
});
const option = (name, fallback) => Number(process.env[name] ?? fallback);
const concurrentJobs = option("BENCH_CONCURRENCY", 24);
const preset = {
  worker: {
    concurrentJobs,
    maxPoolSize: concurrentJobs + 1,
    localQueue: { size: option("BENCH_LOCAL", 500) },
    completeJobBatchDelay: option("BENCH_DELAY", 0),
    failJobBatchDelay: option("BENCH_DELAY", 0),
  },
};
const pool = () => new Pool({ host: process.env.PGHOST, max: concurrentJobs + 1 });

// What whoever started us says. Their end is ours.
const events = { go: null, stop: null };
const heard = {};
for (const name of Object.keys(events)) {
  heard[name] = new Promise((resolve) => (events[name] = resolve));
}
let stopped = false;

class LedgerFile {
  constructor(path) {
    this.file = fs.openSync(path, "r+");
    this.count = 0;
    this.cell = Buffer.alloc(8);
    this.starts = new BigInt64Array(fs.fstatSync(this.file).size / 8 - PROCESSES);
    this.timer = setInterval(() => this.flush(), 20);
  }
  mark(number, immediately) {
    const at = now();
    this.count += 1;
    if (immediately) this.write(PROCESSES + number, at);
    else this.starts[number] = at;
  }
  write(index, value) {
    this.cell.writeBigInt64LE(BigInt(value));
    fs.writeSync(this.file, this.cell, 0, 8, index * 8);
  }
  flush() {
    this.write(0, this.count);
  }
  read(index) {
    fs.readSync(this.file, this.cell, 0, 8, index * 8);
    return this.cell.readBigInt64LE();
  }
  close(immediately) {
    clearInterval(this.timer);
    if (!immediately) {
      const all = Buffer.from(this.starts.buffer);
      fs.writeSync(this.file, all, 0, all.length, PROCESSES * 8);
    }
    this.flush();
  }
}

// Of a kind that PostgreSQL cannot compress.
const PAD = crypto.randomBytes(8000).toString("base64");
const payload = (number, request) => ({
  number,
  pad: PAD.slice(0, Math.max(0, (request.payload ?? 100) - 24)),
});
const specs = (first, jobs, request) =>
  Array.from({ length: jobs }, (_, n) => ({ identifier: "job", payload: payload(first + n, request) }));

async function enqueue(request) {
  const pgPool = pool();
  const utils = await makeWorkerUtils({ pgPool, logger, preset });
  await utils.addJobs([]).catch(() => {});
  tell("ready");
  await heard.go;
  const cpu = process.cpuUsage();
  const started = now();
  const end = request.first + request.jobs;
  if (request.how === "bulk") {
    for (let at = request.first; at < end; at += BATCH) {
      await utils.addJobs(specs(at, Math.min(BATCH, end - at), request));
    }
  } else {
    let next = request.first;
    const caller = async () => {
      while (next < end) {
        const number = next++;
        if (request.how === "transaction") await inTransaction(pgPool, number, request);
        else await utils.addJob("job", payload(number, request));
      }
    };
    await Promise.all(Array.from({ length: request.callers ?? 1 }, caller));
  }
  const ended = now();
  const used = process.cpuUsage(cpu);
  tell("done", { started: Number(started), ended: Number(ended), cpu: (used.user + used.system) / 1e6 });
  await utils.release();
  await pgPool.end();
}

// "Adding jobs through SQL" (worker.graphile.org/docs/sql-add-job) is its way into a transaction.
async function inTransaction(pgPool, number, request, beforeCommit = () => {}) {
  const client = await pgPool.connect();
  try {
    await client.query("BEGIN");
    await client.query({
      name: "add",
      text: "SELECT graphile_worker.add_job('job', $1::json)",
      values: [JSON.stringify(payload(number, request))],
    });
    beforeCommit();
    await client.query("COMMIT");
  } finally {
    client.release();
  }
}

async function sample(request) {
  const pgPool = pool();
  const utils = await makeWorkerUtils({ pgPool, logger, preset });
  const ledger = new LedgerFile(request.ledger);
  clearInterval(ledger.timer);
  const called = [];
  const committed = [];
  tell("ready");
  await heard.go;
  for (let number = request.first; number < request.first + request.jobs; number++) {
    await sleep((0.5 + Math.random()) * request.pause * 1000);
    called.push(Number(now()));
    if (request.how === "transaction") {
      await inTransaction(pgPool, number, request, () => committed.push(Number(now())));
    } else {
      await utils.addJob("job", payload(number, request));
    }
    while (ledger.read(PROCESSES + number) === 0n) await sleep(1);
  }
  tell("done", { called, committed });
  await utils.release();
  await pgPool.end();
}

async function stream(request) {
  const pgPool = pool();
  const utils = await makeWorkerUtils({ pgPool, logger, preset });
  const ledger = new LedgerFile(request.ledger);
  clearInterval(ledger.timer);
  const already = Number(ledger.read(0));
  tell("ready");
  await heard.go;
  const started = Number(now()) / 1e9;
  let sent = 0;
  while (!stopped && sent < request.jobs) {
    if (request.rate != null) {
      const late = Number(now()) / 1e9 - started - sent / request.rate;
      if (late < 0) await sleep(-late * 1000);
    } else if (sent - (Number(ledger.read(0)) - already) >= request.backlog) {
      await sleep(1);
      continue;
    }
    const batch = Math.min(request.batch, request.jobs - sent);
    await utils.addJobs(specs(request.first + sent, batch, request));
    sent += batch;
  }
  tell("done", { sent, seconds: Number(now()) / 1e9 - started });
  await utils.release();
  await pgPool.end();
}

async function work(request) {
  const pgPool = pool();
  const ledger = new LedgerFile(request.ledger);
  // In rounds that measure latency somebody waits for the mark; in a drain it is written at the end.
  const immediately = request.jobs === 0;
  const handlers = {
    async: async ({ number }) => ledger.mark(number, immediately),
    io: async ({ number }) => {
      ledger.mark(number, immediately);
      await sleep(1);
    },
  };
  const taskList = { job: handlers[request.handler] };
  const runner = await run({ pgPool, logger, preset, taskList, noHandleSignals: true });
  tell("ready");
  await heard.stop;
  await runner.stop();
  await pgPool.end();
  ledger.close(immediately);
  tell("done");
}

async function setup() {
  const pgPool = pool();
  await runMigrations({ pgPool, logger, preset });
  await pgPool.end();
  tell("done");
}

const lines = readline.createInterface({ input: process.stdin });
let begun = false;
lines.on("line", (line) => {
  const message = JSON.parse(line);
  if (begun) {
    if (message.verb === "stop") stopped = true;
    events[message.verb]();
    return;
  }
  begun = true;
  const verbs = { setup, enqueue, sample, stream, work };
  verbs[message.verb](message).then(
    () => process.exit(0),
    (error) => {
      process.stderr.write(`${error.stack}\n`);
      process.exit(1);
    },
  );
});
lines.on("close", () => {
  if (!stopped) process.exit(1);
});
