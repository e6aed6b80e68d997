// Everything of the page that is words, numbers and small curves. Knows elements; the numbers are
// the model's.

import { colours, count, duration, fit, level, shorten, span } from "./format.js";
import { percentiles } from "./model.js";

const TILES = ["out", "prompt", "running", "waiting", "kv", "hit"];
const WHOLE = new Set(["running", "waiting"]);
const LATENCIES = ["ttft", "itl", "e2e"];
const NUM_SAMPLES = 60;
const MOST_QUEUED = 8;

const $ = (selector) => document.querySelector(selector);

/** Change a text only if it differs: the page is laid out anew for each change. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export class Panels {
  series = Object.fromEntries([...TILES, ...LATENCIES].map((name) => [name, []]));
  latencies = {}; // name to {values, n}, as shown
  #model;
  #tiles = Object.fromEntries(TILES.map((name) => [name, $(`[data-tile="${name}"]`)]));
  #rows = Object.fromEntries(LATENCIES.map((name) => [name, $(`[data-latency="${name}"]`)]));
  #sampledAt = 0;

  constructor(model) {
    this.#model = model;
  }

  /** The snapshot has come: what does not change, and the last minute as far as it is known. */
  restart() {
    const { about, now } = this.#model;
    write($("#model"), shorten(about.model, 64));
    $("#model").title = about.model;
    $("#docs").hidden = !about.has_docs;
    const settings = Object.entries(about.settings)
      .filter(([, value]) => value !== false)
      .map(([name, value]) => {
        if (value === true) return name;
        return `${name} ${typeof value === "number" ? count(value) : value}`;
      });
    write($("#settings"), settings.join(" · "));
    this.#define(about);
    for (const name of Object.keys(this.series)) this.series[name] = [];
    const first = this.#model.steps[0]?.begin ?? now;
    for (let at = now - NUM_SAMPLES * 1e6; at < now; at += 1e6) this.#sample(at, at >= first);
    this.#sampledAt = now;
    this.update();
  }

  /** Numbers as they stand; called a few times a second at the most. */
  update() {
    const { about, phase } = this.#model;
    if (!about) return;
    const now = this.#model.clock();
    const uptime = about.uptime_s + (now - this.#model.startedAt) / 1e6;
    const facts = [`v${about.version}`, `up ${span(Math.max(0, uptime))}`];
    if (about.api_server_count > 1) facts.push(`${about.api_server_count} frontends`);
    if (phase !== "ready") facts.push(phase);
    write($("#facts"), facts.join(" · "));
    const levels = this.#model.levels(now);
    for (const name of TILES) {
      const text = WHOLE.has(name) ? count(levels[name]) : level(levels[name]);
      if (name !== "waiting") write(this.#tiles[name].querySelector("output"), text);
    }
    write($("#running-unit"), about.settings ? `of ${count(about.settings.max_num_seqs)}` : "");
    this.#updateQueue(now);
    this.#updateLatencies(now);
  }

  /** One more point of every curve. */
  tick() {
    const now = this.#model.clock();
    if (now - this.#sampledAt < 0.9e6) return;
    this.#sampledAt = now;
    this.#sample(now, true);
    this.draw();
  }

  draw() {
    for (const name of TILES) this.#drawTile(name);
    for (const name of LATENCIES) this.#drawTrend(name);
  }

  #sample(time, isKnown) {
    const levels = this.#model.levels(time);
    for (const name of TILES) this.#push(name, isKnown ? levels[name] : NaN);
    for (const name of LATENCIES) {
      const known = percentiles(this.#model.samples(name, time), [50, 99]);
      this.#push(name, known ?? [NaN, NaN]);
    }
  }

  #push(name, value) {
    this.series[name].push(value);
    if (this.series[name].length > NUM_SAMPLES) this.series[name].shift();
  }

  // Words of the catalogue, so that the page says what docs/metrics.md says.
  #define(about) {
    const help = (name) => `${about.metric_prefix}${name}: ${about.definitions[name]}.`;
    const titles = {
      out: help("sampled_tokens_total"),
      prompt: `Context tokens computed, over two seconds. ${help("step_tokens")}`,
      running: help("requests_running"),
      waiting: help("requests_waiting"),
      kv: help("kv_blocks"),
      hit: `Over ten seconds. ${help("prefix_cache_hit_tokens_total")}`,
    };
    for (const name of TILES) this.#tiles[name].title = titles[name];
    const metrics = {
      ttft: "time_to_first_token_seconds",
      itl: "inter_token_latency_seconds",
      e2e: "request_e2e_seconds",
    };
    for (const name of LATENCIES) {
      const title = `${help(metrics[name])} Nearest-rank percentiles of the last minute.`;
      this.#rows[name].title = title;
      this.#rows[name].querySelector("abbr").title = title;
    }
    $("#queue-title").title = help("requests_waiting_by_reason");
    $("#blocks-title").title = help("kv_blocks");
  }

  #updateLatencies(now) {
    for (const name of LATENCIES) {
      const pairs = this.#model.samples(name, now);
      const values = percentiles(pairs);
      const n = pairs.reduce((sum, [, times]) => sum + times, 0);
      this.latencies[name] = { values, n };
      const cells = this.#rows[name].querySelectorAll("td");
      for (let at = 0; at < 3; at++) write(cells[at], values ? duration(values[at]) : "–");
      write(cells[4], count(n));
    }
    const known = Math.min(60, (now - this.#model.firstSeen) / 1e6);
    const note = known < 59 ? `last 60 s; ITL since ${span(Math.max(0, known))}` : "last 60 s";
    write($("#latency-note"), note);
  }

  #updateQueue(now) {
    const waiting = this.#model.waiting();
    const list = $("#queue");
    const shown = waiting.slice(0, MOST_QUEUED);
    while (list.children.length < MOST_QUEUED) list.append(queueRow());
    for (let at = 0; at < MOST_QUEUED; at++) {
      const row = list.children[at];
      const one = shown[at];
      row.dataset.empty = String(!one);
      const [id, reason, tokens, age] = row.children;
      write(id, one ? shorten(one.request.id, 28) : "");
      id.title = one ? one.request.id : "";
      write(reason, one ? one.reason.replaceAll("_", " ") : "");
      const help = this.#model.about.reasons[one?.reason];
      reason.title = one ? (help ?? "the scheduler has not come to it yet") : "";
      row.dataset.preempted = String(Boolean(one?.isPreempted));
      write(tokens, one ? `${count(one.request.num_prompt)} tok` : "");
      write(age, one ? duration(Math.max(0, now - one.since)) : "");
    }
    let note = waiting.length ? `${count(waiting.length)} waiting` : "empty";
    if (waiting.length > MOST_QUEUED) note += `, the first ${MOST_QUEUED} shown`;
    // Steps count those of frontends of which nothing is heard, too.
    const isWhole = this.#model.silent.length === 0;
    if (!isWhole) note += ", as far as is known";
    write($("#queue-note"), note);
    const numWaiting = isWhole ? waiting.length : this.#model.levels(now).waiting;
    write(this.#tiles.waiting.querySelector("output"), count(numWaiting));
  }

  #drawTile(name) {
    const { context: c, width, height } = fit(this.#tiles[name].querySelector("canvas"));
    const values = this.series[name];
    const known = values.filter((value) => !Number.isNaN(value));
    if (known.length < 2) return;
    const top = name === "kv" || name === "hit" ? 100 : Math.max(1, ...known) * 1.1;
    const x = (at) => ((at + NUM_SAMPLES - values.length) / (NUM_SAMPLES - 1)) * width;
    const y = (value) => height - 1.5 - (value / top) * (height - 4);
    const colour = { out: colours.generation, prompt: colours.context }[name] ?? colours.accent;
    const line = trace(values, x, y);
    c.strokeStyle = colour;
    c.lineWidth = 1.5;
    c.lineJoin = "round";
    c.stroke(line.path);
    line.path.lineTo(line.lastX, height);
    line.path.lineTo(line.firstX, height);
    c.globalAlpha = 0.12;
    c.fillStyle = colour;
    if (line.isWhole) c.fill(line.path);
  }

  #drawTrend(name) {
    const { context: c, width, height } = fit(this.#rows[name].querySelector("canvas"));
    const values = this.series[name];
    const known = values.flat().filter((value) => value > 0);
    if (known.length < 4) return;
    const low = Math.log(Math.min(...known)) - 0.15;
    const range = Math.max(0.5, Math.log(Math.max(...known)) + 0.15 - low);
    const x = (at) => ((at + NUM_SAMPLES - values.length) / (NUM_SAMPLES - 1)) * (width - 4) + 2;
    const y = (value) => height - 2 - ((Math.log(Math.max(1, value)) - low) / range) * (height - 4);
    const lower = values.map((pair) => pair[0]);
    const upper = values.map((pair) => pair[1]);
    c.lineJoin = "round";
    c.strokeStyle = colours.muted;
    c.lineWidth = 1;
    c.stroke(trace(upper, x, y).path);
    c.strokeStyle = colours.accent;
    c.lineWidth = 1.75;
    c.stroke(trace(lower, x, y).path);
  }
}

function queueRow() {
  const row = document.createElement("li");
  for (const name of ["id", "reason", "tokens", "age"]) {
    const cell = document.createElement("span");
    cell.className = name;
    row.append(cell);
  }
  return row;
}

function trace(values, x, y) {
  const path = new Path2D();
  let isOpen = false;
  let numPieces = 0;
  let firstX = 0;
  let lastX = 0;
  values.forEach((value, at) => {
    if (Number.isNaN(value)) {
      isOpen = false;
      return;
    }
    if (isOpen) path.lineTo(x(at), y(value));
    else path.moveTo((firstX = x(at)), y(value));
    if (!isOpen) numPieces += 1;
    isOpen = true;
    lastX = x(at);
  });
  return { path, firstX, lastX, isWhole: numPieces === 1 };
}
