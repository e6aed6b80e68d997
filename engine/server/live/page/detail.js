// One step, or one request, in words and with its phases. Knows elements; draws nothing.

import { count, duration, shorten } from "./format.js";
import { write } from "./panels.js";

const FACTS = 8;

export class Detail {
  #model;
  #panel;
  #kicker;
  #label;
  #facts;
  #rows = new Map();

  constructor(model, panel) {
    this.#model = model;
    this.#panel = panel;
    [this.#kicker, this.#label, this.#facts] = panel.children;
    for (let at = 0; at < FACTS; at++) {
      this.#facts.append(document.createElement("dt"), document.createElement("dd"));
    }
  }

  /** The snapshot has come, which says what phases there are. */
  restart() {
    const parent = this.#panel.lastElementChild;
    const phases = Object.entries(this.#model.about.phases);
    phases.sort(([, [a]], [, [b]]) => (a === "worker") - (b === "worker"));
    if (this.#rows.size === phases.length) return;
    this.#rows.clear();
    parent.replaceChildren();
    for (const [name, [thread, help]] of phases) this.#addRow(parent, name, thread, help);
  }

  /** Show a step, or the request that is pointed at. */
  show(step, request, kicker, { isPolite }) {
    this.#panel.setAttribute("aria-live", isPolite ? "polite" : "off");
    if (request) this.#showRequest(request);
    else this.#showStep(step, kicker);
    this.#showPhases(step);
  }

  #showStep(step, kicker) {
    if (!step) return;
    write(this.#kicker, `${kicker} · #${step.step}`);
    this.#panel.dataset.kind = step.kind;
    this.#write(step.label, step.label.indexOf("_generation"));
    const reason = step.admission_stop.replaceAll("_", " ");
    const facts = [
      ["took", duration(step.end - step.begin)],
      ["tokens", count(step.num_context_tokens + step.num_generation_tokens)],
      ["sampled", count(step.num_sampled)],
      ["running", `${count(step.num_running)} after it`],
      ["waiting", count(step.num_waiting) + (reason === "none" ? "" : `, ${reason}`)],
      ["KV blocks", `${count(step.used)} used, ${count(step.cached_free)} cached`],
    ];
    if (step.num_queried) {
      facts.push(["prefix", `${count(step.num_hit)} of ${count(step.num_queried)} hit`]);
    }
    const preempted = step.preempted.filter((_, at) => at % 3 === 0);
    if (preempted.length) facts.push(["preempted", this.#names(preempted)]);
    else if (step.finished.length) facts.push(["finished", this.#names(step.finished)]);
    this.#list(facts);
  }

  #showRequest(request) {
    const r = request;
    write(this.#kicker, `request · ${r.reason ?? "unfinished"}`);
    this.#panel.dataset.kind = "request";
    this.#write(shorten(r.id, 60), 0);
    const now = r.end ?? this.#model.clock();
    const between = (from, to) => (from === null ? "–" : duration((to ?? now) - from));
    const facts = [
      ["queued", between(r.arrival, r.first_scheduled)],
      ["prefill", between(r.first_scheduled, r.first_token)],
      ["TTFT", r.first_token === null ? "–" : duration(r.first_token - r.arrival)],
      ["decode", between(r.first_token, r.end)],
      ["in all", duration(now - r.arrival)],
      ["prompt", `${count(r.num_prompt)} tok, ${count(r.num_cached)} cached`],
      ["output", `${count(r.num_generated)} tok`],
    ];
    const out = r.preemptions.length / 2;
    if (out) facts.push(["preempted", `${out} ×`]);
    this.#list(facts);
  }

  // The text, which may be broken at one place if it must.
  #write(text, at) {
    if (this.#label.textContent === text) return;
    const here = document.createElement("wbr");
    this.#label.replaceChildren(text.slice(0, at), here, text.slice(at));
  }

  #names(nums) {
    const names = nums.slice(0, 2).map((num) => {
      const request = this.#model.requests.get(num);
      return request ? shorten(request.id, 14) : `#${num}`;
    });
    return names.join(", ") + (nums.length > 2 ? ` +${nums.length - 2}` : "");
  }

  #list(facts) {
    const cells = this.#facts.children;
    for (let at = 0; at < FACTS; at++) {
      const [name, value] = facts[at] ?? ["", "\u00a0"];
      write(cells[2 * at], name);
      write(cells[2 * at + 1], value);
    }
  }

  #addRow(parent, name, thread, help) {
    const row = document.createElement("div");
    row.className = `phase ${thread === "worker" ? "worker" : "core"}`;
    row.title = `${thread}: ${help}`;
    const label = document.createElement("span");
    label.textContent = name.replaceAll("_", " ");
    const track = document.createElement("i");
    const bar = document.createElement("b");
    track.append(bar);
    const time = document.createElement("em");
    row.append(label, track, time);
    parent.append(row);
    this.#rows.set(name, { row, bar, time });
  }

  #showPhases(step) {
    if (!step) return;
    const found = new Map();
    let from = 0;
    let to = step.end - step.begin;
    for (let at = 0; at < step.phases.length; at += 3) {
      const [name, offset, length] = step.phases.slice(at, at + 3);
      const known = found.get(name) ?? { offset, length: 0, end: 0 };
      known.length += length;
      known.offset = Math.min(known.offset, offset);
      known.end = Math.max(known.end, offset + length);
      found.set(name, known);
    }
    for (const { offset, end } of found.values()) {
      from = Math.min(from, offset);
      to = Math.max(to, end);
    }
    const range = Math.max(1, to - from);
    for (const [name, { row, bar, time }] of this.#rows) {
      const phase = found.get(name);
      row.dataset.empty = String(!phase);
      if (phase) row.dataset.seen = "true";
      write(time, phase ? duration(phase.length) : "–");
      if (!phase) continue;
      bar.style.marginLeft = `${(100 * (phase.offset - from)) / range}%`;
      bar.style.width = `${Math.max(0.6, (100 * (phase.end - phase.offset)) / range)}%`;
    }
  }
}
