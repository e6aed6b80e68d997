// Draws the KV pool block by block, in the order of block ids. Drawn when the map changes, never
// otherwise. Knows the codes that the snapshot explains.

import { colours, count, fit, hue } from "./format.js";

const SMALLEST = 3; // pixels of a cell, gap included
const LARGEST = 28;

export class Blocks {
  #plot;
  #meter;
  #readout;
  #note;
  #counts;
  #codes = new Uint16Array(0);
  #layout = null;
  #model;
  #highlighted = null;
  #idleText = "";

  constructor(model, elements) {
    this.#model = model;
    this.#plot = elements.plot;
    this.#meter = elements.meter;
    this.#readout = elements.readout;
    this.#note = elements.note;
    this.#counts = elements.counts;
    new ResizeObserver(() => this.draw()).observe(this.#plot);
    this.#plot.addEventListener("pointermove", (event) => this.#point(event));
    this.#plot.addEventListener("pointerleave", () => this.#say(null));
  }

  /** Take over the model's map. */
  update() {
    const { map, about } = this.#model;
    if (!map) {
      this.#codes = new Uint16Array(about?.num_blocks ?? 0);
      this.draw();
      return;
    }
    this.#codes = new Uint16Array(about.num_blocks);
    for (let at = 0, block = 0; at < map.runs.length; at += 2) {
      this.#codes.fill(map.runs[at], block, block + map.runs[at + 1]);
      block += map.runs[at + 1];
    }
    this.#count();
    this.draw();
  }

  /** Emphasise the blocks of one request. */
  highlight(request) {
    const num = request?.num ?? null;
    if (num === this.#highlighted) return;
    this.#highlighted = num;
    this.draw();
  }

  /** Blocks by state: owned, shared, cached, free. */
  counts() {
    const { shared, owned } = this.#model.codes;
    const found = { owned: 0, shared: 0, cached: 0, free: 0 };
    for (const code of this.#codes) {
      found[code === 0 ? "free" : code < shared ? "cached" : code < owned ? "shared" : "owned"]++;
    }
    return found;
  }

  draw() {
    const { context: c, width, height } = fit(this.#plot.firstElementChild);
    const numBlocks = this.#codes.length;
    if (numBlocks === 0 || width === 0) return;
    const layout = (this.#layout = arrange(numBlocks, width, height));
    const gap = Math.min(2.5, Math.max(0.5, layout.pitch / 6));
    const cells = new Map(); // by colour, so that it is set a few times only
    for (let cell = 0; cell < layout.numCells; cell++) {
      const colour = this.#colour(this.#codeOf(cell, layout.perCell));
      if (!cells.has(colour)) cells.set(colour, []);
      cells.get(colour).push(cell);
    }
    const size = layout.pitch - gap;
    for (const [colour, list] of cells) {
      c.fillStyle = colour;
      c.beginPath();
      for (const cell of list) {
        const x = (cell % layout.numColumns) * layout.pitch;
        const y = Math.floor(cell / layout.numColumns) * layout.pitch;
        if (size > 8) c.roundRect(x, y, size, size, 2);
        else c.rect(x, y, size, size);
      }
      c.fill();
    }
    const blocks = `${count(numBlocks)} blocks of ${this.#model.about.block_size} tokens`;
    const cell = layout.perCell === 1 ? "1 cell = 1 block, in the order of ids"
      : `1 cell = ${layout.perCell} blocks, coloured by the most of them`;
    this.#note.textContent = `${blocks} · ${cell}`;
  }

  #colour(code) {
    const { cached_ages_s: ages, shared, owned } = this.#model.codes;
    if (code === 0) return colours.free;
    if (code < shared) {
      const age = (code - 1) / ages.length;
      const share = Math.round(100 - 62 * age);
      return `color-mix(in oklab, ${colours.cached} ${share}%, ${colours.free})`;
    }
    if (code < owned) return colours.shared;
    const num = this.#model.map.owners[code - owned];
    if (this.#highlighted === null || this.#highlighted === num) return hue(num);
    return `color-mix(in oklab, ${hue(num)} 30%, ${colours.free})`;
  }

  #codeOf(cell, perCell) {
    if (perCell === 1) return this.#codes[cell];
    const tally = new Map();
    let best = 0;
    const end = Math.min(this.#codes.length, (cell + 1) * perCell);
    for (let block = cell * perCell; block < end; block++) {
      const code = this.#codes[block];
      tally.set(code, (tally.get(code) ?? 0) + 1);
      if (block === cell * perCell || tally.get(code) > tally.get(best)) best = code;
    }
    return best;
  }

  #count() {
    const found = this.counts();
    const total = this.#codes.length;
    Object.entries(found).forEach(([state, n], at) => {
      this.#meter.children[at].style.flexGrow = String(n);
      this.#counts[state].textContent = count(n);
    });
    const percent = (n) => `${((100 * n) / total).toFixed(1)} %`;
    this.#plot.setAttribute(
      "aria-label",
      `KV blocks: ${percent(found.owned)} held by one request, ${percent(found.shared)} shared, ` +
        `${percent(found.cached)} cached and free, ${percent(found.free)} free`,
    );
    const held = this.#model.map.owners.length;
    this.#idleText = held > 1 ? `${held} requests hold blocks, each in its colour`
      : held ? "one request holds blocks" : "no request holds blocks";
    this.#say(null);
  }

  #point(event) {
    const layout = this.#layout;
    if (!layout) return;
    const box = this.#plot.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / layout.pitch);
    const row = Math.floor((event.clientY - box.top) / layout.pitch);
    const cell = row * layout.numColumns + column;
    if (column < 0 || column >= layout.numColumns || cell >= layout.numCells) this.#say(null);
    else this.#say(cell);
  }

  #say(cell) {
    if (cell === null) {
      this.#readout.textContent = this.#idleText || "\u00a0";
      return;
    }
    const { perCell } = this.#layout;
    const first = cell * perCell;
    const name = perCell === 1 ? `block ${first}` : `blocks ${first}–${first + perCell - 1}`;
    this.#readout.textContent = `${name}: ${this.#describe(this.#codeOf(cell, perCell))}`;
  }

  #describe(code) {
    const { cached_ages_s: ages, shared, owned } = this.#model.codes;
    if (code === 0) return "free";
    if (code < shared) {
      const bound = ages[code - 1];
      const age = bound === undefined ? `over ${ages.at(-1)} s` : `under ${bound} s`;
      return `cached and free, last used ${age} before`;
    }
    if (code < owned) return "shared by several requests";
    const num = this.#model.map.owners[code - owned];
    return `held by ${this.#model.requests.get(num)?.id ?? `request ${num}`}`;
  }
}

/** Cells as large as they fit; several blocks a cell where they would be too small. */
function arrange(numBlocks, width, height) {
  for (let perCell = 1; ; perCell++) {
    const numCells = Math.ceil(numBlocks / perCell);
    const fewest = Math.max(1, Math.ceil(width / LARGEST));
    const most = Math.floor(width / SMALLEST);
    for (let numColumns = fewest; numColumns <= most; numColumns++) {
      const pitch = width / numColumns;
      if (Math.ceil(numCells / numColumns) * pitch <= height) {
        return { perCell, numCells, pitch, numColumns };
      }
    }
  }
}
