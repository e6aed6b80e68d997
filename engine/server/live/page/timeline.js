// Steps and, below them on the same axis, requests: what is in view, what is pointed at, and when
// to draw. Draws at the screen's pace while something moves, and not at all otherwise.

import { firstBehind, lastAtOrBefore, position } from "./axis.js";
import { fit } from "./format.js";
import { Lanes } from "./lanes.js";
import { Strip } from "./strip.js";

const DELAY = 220_000; // behind the server's clock, so that what is drawn is there already
const EASE_MS = 110;
const GUTTER = 46;
const NARROW_GUTTER = 30;
const RIGHT = 10;

export class Timeline {
  spanUs = 5e6;
  isPaused = false;
  pinned = null; // a step
  hovered = null; // a step
  request = null; // a request that is pointed at
  numFrames = 0;
  #model;
  #stripPlot;
  #lanesPlot;
  #edge = null; // what is at the right end of the axis
  #pausedAt = 0;
  #frame = 0;
  #lastMs = 0;
  #onSelect;
  #isStill = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(model, stripPlot, lanesPlot, onSelect) {
    this.#model = model;
    this.strip = new Strip(model);
    this.lanes = new Lanes(model);
    this.#stripPlot = stripPlot;
    this.#lanesPlot = lanesPlot;
    this.#onSelect = onSelect;
    const resized = new ResizeObserver(() => this.refresh());
    resized.observe(stripPlot);
    resized.observe(lanesPlot);
    this.#listen();
  }

  /** Draw soon, and go on for as long as something moves. */
  refresh() {
    if (this.#frame === 0) this.#frame = requestAnimationFrame((ms) => this.#draw(ms));
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.#pausedAt = this.#edge ?? this.#live();
    this.refresh();
  }

  /** Forget what is selected: the model has begun anew. */
  restart() {
    this.pinned = this.hovered = this.request = null;
    this.#edge = null;
    this.#pausedAt = this.#live();
    this.refresh();
  }

  select(step, { pin = false } = {}) {
    if (pin) this.pinned = step;
    else this.hovered = step;
    this.#onSelect();
    this.refresh();
  }

  /** The step that is shown in words. */
  get shown() {
    return this.pinned ?? this.hovered ?? this.#model.lastStep ?? null;
  }

  visibleSteps() {
    const { steps } = this.#model;
    const edge = this.#edge ?? this.#target();
    const begin = firstBehind(steps, edge - this.spanUs);
    let end = begin;
    while (end < steps.length && steps[end].from < edge) end++;
    return steps.slice(begin, end);
  }

  #target() {
    return this.isPaused ? this.#pausedAt : this.#live();
  }

  #live() {
    return position(this.#model.steps, this.#model.clock() - DELAY);
  }

  #draw(ms) {
    this.#frame = 0;
    this.numFrames += 1;
    const target = this.#target();
    const since = Math.min(100, ms - this.#lastMs);
    this.#lastMs = ms;
    const far = Math.abs(target - (this.#edge ?? target)) > 2 * this.spanUs;
    const before = this.#edge;
    if (this.#edge === null || far || this.#isStill.matches) this.#edge = target;
    else this.#edge += (target - this.#edge) * (1 - Math.exp(-since / EASE_MS));
    const strip = fit(this.#stripPlot.firstElementChild);
    const lanes = fit(this.#lanesPlot.firstElementChild);
    const view = this.#view(strip.width);
    const { pinned, hovered, request } = this;
    const nowTime = this.isPaused ? Infinity : this.#model.clock();
    this.strip.draw(strip, view, this.visibleSteps(), { pinned, hovered });
    this.lanes.draw(lanes, view, { pinned, hovered, request, nowTime });
    const moves = before === null || Math.abs(this.#edge - before) > 0.02 * view.perPixel;
    const lag = Math.abs(target - this.#edge) > 0.3 * view.perPixel;
    if ((moves || lag) && !this.#isStill.matches) this.refresh();
  }

  #view(width) {
    const left = width < 520 ? NARROW_GUTTER : GUTTER;
    const room = width - left - RIGHT;
    const perPixel = this.spanUs / room;
    const edge = this.#edge;
    return {
      left,
      right: left + room,
      perPixel,
      width,
      x: (at) => left + room - (edge - at) / perPixel,
      at: (x) => edge - (left + room - x) * perPixel,
    };
  }

  // -- pointers and keys -----------------------------------------------------------------------

  #listen() {
    for (const plot of [this.#stripPlot, this.#lanesPlot]) {
      plot.addEventListener("pointermove", (event) => this.#point(plot, event));
      plot.addEventListener("pointerleave", () => {
        this.request = null;
        this.select(null);
      });
      plot.addEventListener("click", (event) => {
        this.#point(plot, event);
        this.select(this.hovered === this.pinned ? null : this.hovered, { pin: true });
      });
      plot.addEventListener("keydown", (event) => this.#key(plot, event));
      plot.addEventListener("blur", () => {
        this.request = null;
        this.select(null);
      });
    }
  }

  #point(plot, event) {
    if (this.#edge === null) return;
    const box = plot.getBoundingClientRect();
    const view = this.#view(box.width);
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const { steps } = this.#model;
    const at = view.at(x);
    let step = steps[firstBehind(steps, at - 2 * view.perPixel)] ?? null;
    if (step && step.from > at + 2 * view.perPixel) step = null;
    if (x < view.left || x > view.right) step = null;
    this.request = null;
    if (plot === this.#lanesPlot) {
      const lane = this.lanes.rows.find(
        (one) => y >= one.y && y < one.y + one.pitch && at >= one.from && at <= one.to,
      );
      this.request = lane?.request ?? null;
    }
    this.select(step);
  }

  #key(plot, event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    const isLanes = plot === this.#lanesPlot;
    if (event.key === "Escape") {
      this.request = null;
      this.hovered = null;
      this.select(null, { pin: true });
    } else if (event.key === "Enter") {
      this.select(this.pinned ? null : this.hovered, { pin: true });
    } else if (isLanes && move) {
      this.#moveRequest(move);
    } else if (!isLanes && (move || event.key === "Home" || event.key === "End")) {
      this.#moveStep(event.key, move);
    } else {
      return;
    }
    event.preventDefault();
  }

  #moveStep(key, move) {
    const steps = this.visibleSteps();
    if (steps.length === 0) return;
    const at = steps.indexOf(this.pinned ?? this.hovered);
    const last = steps.length - 1;
    let next = at < 0 ? last : Math.min(last, Math.max(0, at + (move ?? 0)));
    if (key === "Home") next = 0;
    if (key === "End") next = last;
    if (this.pinned) this.select(steps[next], { pin: true });
    else this.select(steps[next]);
  }

  #moveRequest(move) {
    const lanes = this.lanes.rows.toSorted((a, b) => a.y - b.y || a.from - b.from);
    if (lanes.length === 0) return;
    const at = lanes.findIndex((one) => one.request === this.request);
    const next = at < 0 ? 0 : (at + move + lanes.length) % lanes.length;
    this.request = lanes[next].request;
    const { steps } = this.#model;
    this.select(steps[Math.max(0, lastAtOrBefore(steps, this.request.first_token ?? Infinity))]);
  }
}
