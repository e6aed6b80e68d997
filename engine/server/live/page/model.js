// What is known of the engine, put together from the stream's snapshot and deltas. Knows records;
// knows no page. All times are the server's, in microseconds.

import { lastAtOrBefore, place } from "./axis.js";

const MAX_STEPS = 2400;
const MAX_REQUESTS = 4000;
const ROW_GAP = 250_000; // between two requests in one row of the picture

export class Model {
  about = null;
  phase = "connecting";
  steps = [];
  requests = new Map(); // by number
  gaps = []; // {time, pairs} with pairs of time between tokens and how often
  map = null;
  codes = null;
  now = 0; // the server's time of the last message
  windowUs = 60e6;
  numSnapshots = 0;
  numLostFrames = 0;
  numMissingSteps = 0;
  firstSeen = 0; // since when inter-token times are known
  lastActivity = 0;
  hasStatistics = true;
  silent = []; // numbers of other frontends of which nothing is heard
  recording = null; // folder of the recording that is being written, null without one
  #columns = null;
  #rowsFreeAt = [];
  #offset = Infinity;

  /** Take a message of the stream in. */
  apply(message) {
    if (message.kind === "snapshot") this.#restart(message);
    this.now = message.now;
    this.#keepClock(message.now);
    if (message.phase !== undefined) this.phase = message.phase;
    if (message.silent !== undefined) this.silent = message.silent;
    if (message.recording !== undefined) this.recording = message.recording;
    for (const row of message.arrived ?? []) this.#keepRequest(row);
    for (const row of message.steps ?? []) this.#keepStep(row);
    for (const row of message.first_tokens ?? []) {
      const { num, ...times } = this.#object("first_token", row);
      const request = this.requests.get(num);
      if (request) Object.assign(request, times);
    }
    const progress = message.progress ?? [];
    for (let at = 0; at < progress.length; at += 2) {
      const request = this.requests.get(progress[at]);
      if (request) request.num_generated = progress[at + 1];
    }
    if (message.kind === "delta") {
      for (const row of message.ended ?? []) this.#keepRequest(row);
      if (message.gaps) this.gaps.push({ time: message.now, pairs: message.gaps });
    }
    if (message.map) this.map = message.map;
    if (message.steps?.length || message.arrived?.length || message.ended?.length) {
      this.lastActivity = message.now;
    }
    this.#forget();
  }

  /** The server's time at this moment, as well as it can be told. */
  clock() {
    return this.#offset === Infinity ? 0 : performance.now() * 1000 - this.#offset;
  }

  get lastStep() {
    return this.steps.at(-1);
  }

  /** Requests that wait, in the order in which they are likely to be admitted. */
  waiting() {
    const last = this.lastStep;
    const found = [];
    for (const request of this.requests.values()) {
      if (request.end !== null) continue;
      const out = request.preemptions.length && request.preemptions.at(-1) === null;
      if (request.first_scheduled !== null && !out) continue;
      let reason = "arriving";
      if (last && last.planned >= request.arrival && last.admission_stop !== "none") {
        reason = last.stopped_request === request.num ? last.admission_stop : "head_of_line";
      }
      const since = out ? request.preemptions.at(-2) : request.arrival;
      found.push({ request, reason, since, isPreempted: out });
    }
    return found.sort(
      (a, b) =>
        b.isPreempted - a.isPreempted ||
        a.request.arrival - b.request.arrival ||
        a.request.num - b.request.num,
    );
  }

  /** Samples of a latency in the window that ends at a time: pairs of value and count. */
  samples(name, until = this.now) {
    const since = until - this.windowUs;
    const pairs = [];
    if (name === "itl") {
      for (const entry of this.gaps) {
        if (entry.time <= since || entry.time > until) continue;
        for (let at = 0; at < entry.pairs.length; at += 2) {
          pairs.push([entry.pairs[at], entry.pairs[at + 1]]);
        }
      }
      return pairs;
    }
    const stamp = name === "ttft" ? "first_token" : "end";
    for (const request of this.requests.values()) {
      const time = request[stamp];
      if (time !== null && time > since && time <= until) pairs.push([time - request.arrival, 1]);
    }
    return pairs;
  }

  /** Rates over the two seconds before a time, and levels at it. */
  levels(time) {
    const steps = this.steps;
    const index = lastAtOrBefore(steps, time);
    let out = 0;
    let prompt = 0;
    let hit = 0;
    let queried = 0;
    for (let at = index; at >= 0 && steps[at].end > time - 10e6; at--) {
      const step = steps[at];
      hit += step.num_hit;
      queried += step.num_queried;
      if (step.end > time - 2e6) {
        out += step.num_sampled / 2;
        prompt += step.num_context_tokens / 2;
      }
    }
    const last = steps[index];
    const numBlocks = this.about?.num_blocks || NaN;
    return {
      out,
      prompt,
      running: last ? last.num_running : 0,
      waiting: last ? last.num_waiting : 0,
      kv: last ? (100 * last.used) / numBlocks : NaN,
      hit: queried ? (100 * hit) / queried : NaN,
    };
  }

  #restart(message) {
    this.about = message.about;
    this.codes = message.codes;
    this.windowUs = message.window_s * 1e6;
    this.hasStatistics = message.has_statistics;
    this.#columns = message.columns;
    this.steps = [];
    this.requests = new Map();
    this.gaps = (message.gaps ?? []).map(([time, pairs]) => ({ time, pairs }));
    this.map = message.map ?? null;
    this.numSnapshots += 1;
    this.numLostFrames += message.num_lost ?? 0;
    this.numMissingSteps = 0;
    this.firstSeen = this.gaps[0]?.time ?? message.now;
    this.#rowsFreeAt = [];
    this.#offset = Infinity;
    const rows = [...(message.ended ?? []), ...(message.unfinished ?? [])];
    rows.sort((a, b) => a[2] - b[2]);
    for (const row of rows) this.#keepRequest(row);
    this.lastActivity = Math.max(
      ...rows.map((row) => row[7] ?? message.now),
      (message.steps ?? []).at(-1)?.[3] ?? -Infinity,
    );
  }

  #object(kind, row) {
    const object = {};
    this.#columns[kind].forEach((name, at) => (object[name] = row[at]));
    return object;
  }

  #keepStep(row) {
    const step = this.#object("step", row);
    const before = this.lastStep;
    place(step, before);
    if (before) this.numMissingSteps += Math.max(0, step.step - before.step - 1);
    this.steps.push(step);
    for (const num of step.admitted) {
      const request = this.requests.get(num);
      if (!request) continue;
      if (request.first_scheduled === null) request.first_scheduled = step.planned;
      else if (request.preemptions.at(-1) === null) request.preemptions.splice(-1, 1, step.planned);
    }
    for (let at = 0; at < step.preempted.length; at += 3) {
      const request = this.requests.get(step.preempted[at]);
      if (request && !request.preemptions.includes(step.planned)) {
        request.preemptions.push(step.planned, null);
      }
    }
    for (const num of step.first_tokens) {
      const request = this.requests.get(num);
      if (request) request.first_token ??= step.core_end;
    }
  }

  #keepRequest(row) {
    const request = this.#object("request", row);
    const known = this.requests.get(request.num);
    if (known) {
      Object.assign(known, request);
      if (request.end !== null) this.#rowsFreeAt[known.row] = request.end + ROW_GAP;
      return;
    }
    const free = this.#rowsFreeAt;
    let at = free.findIndex((time) => time < request.arrival);
    if (at < 0) at = free.length;
    free[at] = request.end === null ? Infinity : request.end + ROW_GAP;
    request.row = at;
    this.requests.set(request.num, request);
  }

  #forget() {
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS + 200);
    const since = this.now - this.windowUs;
    while (this.gaps.length && this.gaps[0].time <= since - this.windowUs) this.gaps.shift();
    const oldest = this.steps.length ? Math.min(this.steps[0].begin, since) : since;
    for (const [num, request] of this.requests) {
      if (request.end === null) continue;
      const isOld = request.end < since - this.windowUs && request.end < oldest;
      if (isOld || this.requests.size > MAX_REQUESTS) this.requests.delete(num);
      else break;
    }
  }

  // Messages come late by what the network takes: the least late of the recent ones is the clock.
  #keepClock(now) {
    const offset = performance.now() * 1000 - now;
    this.#offset = offset < this.#offset ? offset : this.#offset + 0.02 * (offset - this.#offset);
  }
}

/** Nearest-rank percentiles of pairs of value and count; null of nothing. */
export function percentiles(pairs, ranks = [50, 90, 99]) {
  const total = pairs.reduce((sum, [, count]) => sum + count, 0);
  if (total === 0) return null;
  const sorted = pairs.toSorted((a, b) => a[0] - b[0]);
  return ranks.map((rank) => {
    let left = Math.ceil((rank / 100) * total);
    for (const [value, count] of sorted) {
      left -= count;
      if (left <= 0) return value;
    }
    return sorted.at(-1)[0];
  });
}
