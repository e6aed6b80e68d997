// Numbers as people read them, and the colours of the page. Knows no data.

export const MONO =
  '"JetBrains Mono", ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace';
export const SANS = 'Inter, system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** A duration in microseconds. */
export function duration(us) {
  if (us === null || us === undefined || Number.isNaN(us)) return "–";
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 10_000) return `${(us / 1000).toFixed(2)} ms`;
  if (us < 100_000) return `${(us / 1000).toFixed(1)} ms`;
  if (us < 1_000_000) return `${Math.round(us / 1000)} ms`;
  if (us < 10_000_000) return `${(us / 1e6).toFixed(2)} s`;
  if (us < 120_000_000) return `${(us / 1e6).toFixed(1)} s`;
  return span(us / 1e6);
}

/** A long time in seconds. */
export function span(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

/** A whole number, with thin spaces between thousands. */
export function count(n) {
  return Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

/** A rate or level that changes: few digits. */
export function level(n) {
  if (Number.isNaN(n)) return "–";
  return n >= 10 || n === 0 ? count(n) : n.toFixed(1);
}

/** Shortened in the middle. */
export function shorten(text, most) {
  if (text.length <= most) return text;
  const half = Math.floor((most - 1) / 2);
  return `${text.slice(0, most - 1 - half)}…${text.slice(text.length - half)}`;
}

/** Colours of the style sheet, read again when the scheme changes. */
export const colours = {};

const NAMES = [
  ...["context", "mixed", "generation", "queued", "preempted", "ink", "muted", "line", "panel"],
  ...["shared", "cached", "free", "accent", "faint", "band"],
];

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
}

/** A request's own colour, or a softer one to write on: numbers in a row are far apart on the
 * wheel of hues. */
export function hue(num, isSoft = false) {
  // Of several frontends, each numbers its requests from a number of fourteen digits on.
  const angle = Math.round((num % 2 ** 24) * 137.508 + 200) % 360;
  if (isSoft) return colours.isDark ? `oklch(0.42 0.075 ${angle})` : `oklch(0.87 0.07 ${angle})`;
  return colours.isDark ? `oklch(0.74 0.12 ${angle})` : `oklch(0.66 0.14 ${angle})`;
}

/** Fit a canvas to its element; returns its context in CSS pixels, and its size. */
export function fit(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.globalAlpha = 1;
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
