// Draws the strip of steps: bars, a row for each kind, labels, the time of day. Knows pixels; knows
// no pointer.

import { GAP, position } from "./axis.js";
import { colours, count, duration, MONO, SANS } from "./format.js";

const MARKS = { top: 2, height: 14 };
const BARS = { top: 20, height: 122 };
const KINDS = { top: 150, height: 7, pitch: 10 };
const LABELS = { top: 191, pitch: 15 };
const KIND_ROWS = ["context", "mixed", "generation"];

export class Strip {
  height = "tokens"; // what a bar's height is, or "time"
  #model;
  #top = 1; // of the vertical scale

  constructor(model) {
    this.#model = model;
  }

  /** Draw steps, some of them marked. */
  draw({ context: c, height }, view, steps, { pinned, hovered }) {
    this.#scale(steps);
    this.#drawScale(c, view);
    c.save();
    c.beginPath();
    c.rect(view.left, 0, view.right - view.left + 1, height);
    c.clip();
    this.#drawTicks(c, view, height);
    drawBand(c, view, height, hovered);
    drawBand(c, view, height, pinned);
    for (const kind of KIND_ROWS) {
      c.fillStyle = colours[kind];
      for (const step of steps) if (step.kind === kind) this.#drawStep(c, view, step);
    }
    this.#drawStops(c, view, steps);
    for (const step of steps) {
      if (step.preempted.length) this.#drawPreemption(c, view, step);
      if (step.cut) this.#drawCut(c, view, step);
    }
    this.#drawOutline(c, view, pinned ?? hovered);
    this.#drawLabels(c, view, { pinned, hovered });
    c.restore();
  }

  #value(step) {
    return this.height === "tokens"
      ? Math.log2(1 + step.num_context_tokens + step.num_generation_tokens)
      : step.end - step.begin;
  }

  #scale(steps) {
    let top = this.height === "tokens" ? 3 : 1000;
    for (const step of steps) top = Math.max(top, this.#value(step));
    // Falls slowly, so that bars do not jump when the highest leaves.
    this.#top = Math.max(top, this.#top > top ? this.#top + (top - this.#top) * 0.08 : top);
    if (this.#top < 1.02 * top) this.#top = top;
  }

  #barHeight(step) {
    return Math.max(1.5, (this.#value(step) / (1.06 * this.#top)) * BARS.height);
  }

  #drawScale(c, view) {
    c.font = `10px ${SANS}`;
    c.textAlign = "right";
    c.textBaseline = "middle";
    const bottom = BARS.top + BARS.height;
    for (const [value, text] of this.#marks()) {
      const y = Math.round(bottom - (value / (1.06 * this.#top)) * BARS.height) + 0.5;
      if (y < BARS.top + 2) continue;
      c.strokeStyle = colours.line;
      c.beginPath();
      c.moveTo(view.left, y);
      c.lineTo(view.right, y);
      c.stroke();
      c.fillStyle = colours.muted;
      c.fillText(text, view.left - 7, y);
    }
    KIND_ROWS.forEach((kind, row) => {
      const y = KINDS.top + row * KINDS.pitch;
      c.fillStyle = colours.faint;
      c.fillRect(view.left, y, view.right - view.left, KINDS.height);
      c.fillStyle = colours.muted;
      c.font = `600 8px ${SANS}`;
      c.fillText(kind[0].toUpperCase(), view.left - 7, y + KINDS.height / 2 + 0.5);
    });
  }

  #marks() {
    if (this.height === "tokens") {
      const marks = [1, 4, 16, 64, 256, 1024, 4096, 16384];
      return marks.map((n) => [Math.log2(1 + n), count(n)]);
    }
    let step = 1000;
    while (this.#top / step > 4) step *= [2, 2.5, 2][Math.round(Math.log10(step) * 3) % 3];
    return [1, 2, 3, 4].map((n) => [n * step, duration(n * step).replace(/\.0+ /, " ")]);
  }

  #drawStep(c, view, step) {
    const x0 = view.x(step.from);
    const x1 = view.x(step.to);
    const gap = x1 - x0 > 3 ? 1 : 0;
    const width = Math.max(1, x1 - x0 - gap);
    const height = this.#barHeight(step);
    const top = BARS.top + BARS.height - height;
    if (width > 5) {
      c.beginPath();
      c.roundRect(x0, top, width, height, [Math.min(3, height), Math.min(3, height), 0, 0]);
      c.fill();
    } else {
      c.fillRect(x0, top, width, height);
    }
    c.fillRect(x0, KINDS.top + KIND_ROWS.indexOf(step.kind) * KINDS.pitch, width, KINDS.height);
  }

  #drawOutline(c, view, step) {
    if (!step) return;
    const x0 = view.x(step.from);
    const height = this.#barHeight(step);
    c.strokeStyle = colours.ink;
    c.lineWidth = 1.5;
    const width = Math.max(2, view.x(step.to) - x0 - 1);
    c.strokeRect(x0 - 0.5, BARS.top + BARS.height - height - 0.5, width + 1, height + 1);
    c.lineWidth = 1;
  }

  // A thin line above the steps that left requests waiting.
  #drawStops(c, view, steps) {
    c.fillStyle = colours.muted;
    for (const step of steps) {
      if (step.admission_stop === "none") continue;
      const x0 = view.x(step.from);
      c.fillRect(x0, MARKS.top + MARKS.height - 2, Math.max(1, view.x(step.to) - x0), 2);
    }
  }

  #drawPreemption(c, view, step) {
    const x = view.x(step.from);
    c.fillStyle = colours.preempted;
    c.beginPath();
    c.moveTo(x - 5, MARKS.top);
    c.lineTo(x + 5, MARKS.top);
    c.lineTo(x, MARKS.top + 8);
    c.fill();
  }

  #drawCut(c, view, step) {
    const x = Math.round(view.x(step.from) - GAP / 2 / view.perPixel) + 0.5;
    c.strokeStyle = colours.muted;
    c.setLineDash([2, 3]);
    c.beginPath();
    c.moveTo(x, BARS.top);
    c.lineTo(x, BARS.top + BARS.height);
    c.stroke();
    c.setLineDash([]);
    c.font = `10px ${SANS}`;
    c.textAlign = "center";
    c.textBaseline = "top";
    const text = `idle ${duration(step.cut + GAP)}`;
    const width = c.measureText(text).width + 10;
    c.fillStyle = colours.panel;
    c.fillRect(x - width / 2, BARS.top + BARS.height / 2 - 9, width, 18);
    c.fillStyle = colours.muted;
    c.fillText(text, x, BARS.top + BARS.height / 2 - 5);
  }

  // As many labels as fit: in one row those of steps with context, in the other the rest.
  #drawLabels(c, view, { pinned, hovered }) {
    c.font = `10px ${MONO}`;
    c.textAlign = "left";
    c.textBaseline = "middle";
    const char = c.measureText("0").width;
    const placed = [];
    const rows = [
      { kinds: ["context", "mixed"], y: LABELS.top },
      { kinds: ["generation"], y: LABELS.top + LABELS.pitch },
    ];
    for (const row of rows) {
      const fits = (step) => Math.ceil((step.label.length * char + 22) * view.perPixel);
      let freeFrom = -Infinity;
      for (const step of this.#labelled(row.kinds, fits, view)) {
        const x = view.x(step.from);
        if (x > view.right || x + step.label.length * char < view.left || step.from < freeFrom) {
          continue;
        }
        freeFrom = step.from + fits(step);
        placed.push({ step, x, y: row.y });
      }
    }
    for (const { step, x, y } of placed) {
      c.strokeStyle = colours[step.kind];
      c.beginPath();
      c.moveTo(Math.round(x) + 0.5, KINDS.top + 3 * KINDS.pitch);
      c.lineTo(Math.round(x) + 0.5, y + 4);
      c.stroke();
    }
    for (const { step, x, y } of placed) {
      c.fillStyle = colours.panel;
      c.fillRect(x + 2, y - 7, step.label.length * char + 8, 13);
      c.fillStyle = step === pinned || step === hovered ? colours.ink : colours.muted;
      c.fillText(step.label, x + 5, y);
    }
  }

  // Chosen once from the oldest step on, so that labels do not hop while the strip moves.
  *#labelled(kinds, fits, view) {
    const key = `${kinds[0]} ${view.perPixel}`;
    const { steps } = this.#model;
    let freeFrom = -Infinity;
    for (const step of steps) {
      if (!kinds.includes(step.kind)) continue;
      step.labelled ??= {};
      if (step.labelled.key !== key) {
        step.labelled = { key, isChosen: step.from >= freeFrom };
      }
      if (!step.labelled.isChosen) continue;
      freeFrom = step.from + fits(step);
      yield step;
    }
  }

  #drawTicks(c, view, height) {
    const { steps } = this.#model;
    const zero = this.#model.about?.wall_us ?? 0;
    const every = [0.25e6, 0.5e6, 1e6, 2e6, 5e6, 10e6, 30e6, 60e6].find(
      (us) => us / view.perPixel > 74,
    ) ?? 60e6;
    c.font = `10px ${SANS}`;
    c.textAlign = "center";
    c.textBaseline = "bottom";
    let lastX = Infinity;
    const now = this.#model.clock();
    let wall = Math.floor((zero + now) / every) * every;
    for (let n = 0; n < 400; n++, wall -= every) {
      const x = view.x(position(steps, wall - zero));
      if (x < view.left) break;
      if (x > view.right || lastX - x < 60) continue;
      lastX = x;
      c.strokeStyle = colours.line;
      c.beginPath();
      c.moveTo(Math.round(x) + 0.5, BARS.top);
      c.lineTo(Math.round(x) + 0.5, KINDS.top + 3 * KINDS.pitch);
      c.stroke();
      c.fillStyle = colours.muted;
      c.fillText(timeOfDay(wall, every), x, height - 1);
    }
  }
}

/** Shade a step from top to bottom. */
export function drawBand(c, view, height, step) {
  if (!step) return;
  const x0 = view.x(step.from);
  c.fillStyle = colours.band;
  c.fillRect(x0 - 1, 0, Math.max(2, view.x(step.to) - x0 + 1), height);
}

function timeOfDay(wallUs, every) {
  const text = new Date(wallUs / 1000).toLocaleTimeString("en-GB");
  return every < 1e6 ? `${text}.${String(Math.floor(wallUs / 1e4) % 100).padStart(2, "0")}` : text;
}
