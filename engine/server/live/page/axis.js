// The time axis that steps and requests share. Time runs true to scale, but for long idle gaps,
// which are cut to a fixed length. Knows steps' begins and ends; knows no pixels.

/** Longest gap that is drawn true to scale, in microseconds. */
export const GAP = 1_000_000;

/** Place a step behind the one before it: `from` and `to` on the axis, `cut` in microseconds. */
export function place(step, before) {
  const gap = before ? step.begin - before.end : 0;
  step.cut = gap > GAP ? gap - GAP : 0;
  step.from = (before ? before.to : 0) + (gap - step.cut);
  step.to = step.from + Math.max(1, step.end - step.begin);
}

/** Where a time is on the axis, as far as the steps tell. */
export function position(steps, time) {
  if (steps.length === 0) return 0;
  const index = lastAtOrBefore(steps, time);
  if (index < 0) return steps[0].from - Math.min(steps[0].begin - time, 60e6);
  const step = steps[index];
  if (time <= step.end) return step.from + (time - step.begin);
  const since = time - step.end;
  const next = steps[index + 1];
  if (next === undefined) return step.to + Math.min(since, GAP);
  if (next.cut === 0) return step.to + since;
  const until = next.begin - time;
  return since < GAP / 2 ? step.to + since : step.to + Math.max(GAP / 2, GAP - until);
}

/** Index of the last step that had begun by a time; -1 for none. */
export function lastAtOrBefore(steps, time) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].begin <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Index of the first step that ends behind a position. */
export function firstBehind(steps, at) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].to <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}
