// Draws requests as lanes, on the axis of the strip. A lane's row is the model's. Knows pixels;
// knows no pointer.

import { position } from "./axis.js";
import { colours, count, hue, SANS, shorten } from "./format.js";
import { drawBand } from "./strip.js";

const COUNTS = [12, 16, 20, 26, 36, 48]; // of lanes, so that their height seldom changes
const TOP = 6;

export class Lanes {
  rows = []; // what is drawn: request, from and to on the axis, y and pitch in pixels
  numHidden = 0; // requests in view for which there is no room
  #model;
  #pointed = null;

  constructor(model) {
    this.#model = model;
  }

  /** Draw what requests there are in view; `nowTime` is how far unfinished ones have got. */
  draw({ context: c, height }, view, { pinned, hovered, request: pointed, nowTime }) {
    const { steps } = this.#model;
    this.#pointed = pointed;
    const shown = [];
    let numRows = 1;
    for (const request of this.#model.requests.values()) {
      const from = position(steps, request.arrival);
      const to = request.end === null ? Infinity : position(steps, request.end);
      if (view.x(to) < view.left || view.x(from) > view.right) continue;
      shown.push({ request, from, to });
      numRows = Math.max(numRows, request.row + 1);
    }
    const most = Math.max(COUNTS[0], Math.floor((height - TOP) / 6));
    const fitting = COUNTS.filter((n) => n <= most);
    const numLanes = fitting.find((n) => n >= numRows) ?? fitting.at(-1);
    const pitch = (height - TOP) / numLanes;
    c.save();
    c.beginPath();
    c.rect(view.left, 0, view.right - view.left + 1, height);
    c.clip();
    drawBand(c, view, height, hovered);
    drawBand(c, view, height, pinned);
    this.rows = [];
    for (const one of shown) {
      if (one.request.row >= numLanes) continue;
      const y = TOP + one.request.row * pitch;
      this.#drawLane(c, view, one, y, pitch > 10 ? pitch - 3 : pitch - 1, nowTime);
      this.rows.push({ ...one, y, pitch });
    }
    c.restore();
    this.numHidden = shown.filter(({ request }) => request.row >= numLanes).length;
  }

  #drawLane(c, view, { request: r }, y, height, nowTime) {
    const { steps } = this.#model;
    const x = (time) => view.x(position(steps, Math.min(time, nowTime)));
    const end = r.end ?? nowTime;
    const stop = Math.min(end === Infinity ? this.#model.now : end, nowTime);
    const scheduled = Math.min(r.first_scheduled ?? stop, stop);
    const first = Math.min(r.first_token ?? stop, stop);
    const [xa, xs, xf, xe] = [r.arrival, scheduled, first, stop].map(x);
    c.globalAlpha = this.#pointed && this.#pointed !== r ? 0.35 : 1;
    const middle = y + height / 2;
    c.fillStyle = colours.queued;
    c.fillRect(xa, middle - 1, xs - xa, 2);
    c.fillStyle = colours.context;
    c.fillRect(xs, y, xf - xs, height);
    if (xe > xf) {
      c.fillStyle = hue(r.num, true);
      c.fillRect(xf, y, xe - xf, height);
    }
    const hatched = [];
    for (let at = 0; at < r.preemptions.length; at += 2) {
      hatched.push([x(r.preemptions[at]), x(r.preemptions[at + 1] ?? stop)]);
      this.#drawHatch(c, ...hatched.at(-1), y, height);
    }
    if (r.first_token !== null) {
      c.fillStyle = colours.ink;
      c.fillRect(xf - 0.75, y, 1.5, height);
    }
    const [from, to] = widestGap(Math.max(xf, view.left), Math.min(xe, view.right), hatched);
    if (height > 8) this.#drawLaneText(c, r, { from, to, middle });
    if (r.end !== null) this.#drawEnd(c, r, xe, middle, Math.min(4, height / 2.6));
    c.globalAlpha = 1;
  }

  #drawHatch(c, x0, x1, y, height) {
    c.fillStyle = colours.panel;
    c.fillRect(x0, y, x1 - x0, height);
    c.save();
    c.beginPath();
    c.rect(x0, y, x1 - x0, height);
    c.clip();
    c.strokeStyle = colours.preempted;
    c.beginPath();
    for (let x = x0 - height; x < x1; x += 5) {
      c.moveTo(x, y + height);
      c.lineTo(x + height, y);
    }
    c.stroke();
    c.strokeRect(x0, y + 0.5, x1 - x0, height - 1);
    c.restore();
  }

  #drawLaneText(c, r, { from, to, middle }) {
    const room = to - from - 14;
    if (room < 34) return;
    c.font = `10px ${SANS}`;
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.fillStyle = colours.ink;
    const tokens = `${count(r.num_generated)} tok`;
    const wide = room > 150;
    const name = wide ? shorten(r.id, Math.floor((room - 60) / 6)) : "";
    c.fillText(wide ? name : tokens, from + 7, middle + 0.5);
    if (wide) {
      c.fillStyle = colours.muted;
      c.fillText(tokens, from + 15 + c.measureText(name).width, middle + 0.5);
    }
  }

  #drawEnd(c, r, x, y, radius) {
    const isGood = r.reason === "stop" || r.reason === "length";
    c.lineWidth = 1.5;
    c.strokeStyle = r.reason === "error" ? colours.preempted : colours.ink;
    c.fillStyle = isGood ? hue(r.num) : colours.panel;
    c.beginPath();
    if (r.reason === "error") {
      c.moveTo(x - radius, y - radius);
      c.lineTo(x + radius, y + radius);
      c.moveTo(x - radius, y + radius);
      c.lineTo(x + radius, y - radius);
    } else {
      c.arc(x, y, radius, 0, 7);
      c.fill();
    }
    if (!isGood) c.stroke();
    c.lineWidth = 1;
  }
}

/** The widest stretch from one end to the other that none of the pairs, in order, covers. */
export function widestGap(from, to, covered) {
  let widest = [from, from];
  let begin = from;
  for (const [left, right] of [...covered, [to, to]]) {
    const end = Math.min(left, to);
    if (end - begin > widest[1] - widest[0]) widest = [begin, end];
    begin = Math.max(begin, right);
  }
  return widest;
}
