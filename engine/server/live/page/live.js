// The live view: puts stream, model and views together. See the module of each for what it knows.

import { Blocks } from "./blocks.js";
import { Detail } from "./detail.js";
import { count, readColours, shorten } from "./format.js";
import { Model } from "./model.js";
import { Panels, write } from "./panels.js";
import { authorization, keepKey, Stream } from "./stream.js";
import { Timeline } from "./timeline.js";

const $ = (selector) => document.querySelector(selector);
const NUMBERS_EVERY_MS = 240;

const STATES = {
  connecting: "connecting",
  live: "live",
  paused: "paused",
  starting: "engine is starting",
  stopping: "server is stopping",
  lost: "connection lost, trying again",
  refused: "refused, trying again",
  key: "needs an API key",
  ended: "engine is gone",
};

readColours();
const model = new Model();
const panels = new Panels(model);
const detail = new Detail(model, $("#detail"));
const timeline = new Timeline(model, $("#strip"), $("#lanes"), showDetail);
const blocks = new Blocks(model, {
  plot: $("#blocks"),
  meter: $("#blocks-meter"),
  readout: $("#blocks-readout"),
  note: $("#blocks-note"),
  counts: Object.fromEntries(
    ["owned", "shared", "cached", "free"].map((state) => [state, $(`[data-count="${state}"]`)]),
  ),
});
const connection = { state: "connecting", detail: "", hasEnded: false };
let traceNote = { runDir: null, text: "" }; // what the last click came to
let numbersAt = 0;
let numbersTimer = 0;

const stream = new Stream("live/events", {
  onMessage(message) {
    const isFirst = message.kind === "snapshot";
    model.apply(message);
    if (isFirst) restart();
    if (message.map) blocks.update();
    if (message.phase !== undefined || isFirst) showState();
    if (message.recording !== undefined) showRecording();
    timeline.refresh();
    wantNumbers();
  },
  onState(state, text) {
    if (state === "live") connection.hasEnded = false;
    if (state === "ended") connection.hasEnded = true;
    // That the server is gone too, after its engine, is no news.
    const isNews = !(connection.hasEnded && state === "lost");
    if (isNews) Object.assign(connection, { state, detail: text });
    showState();
  },
});

function restart() {
  model.startedAt = model.now;
  panels.restart();
  panels.draw();
  detail.restart();
  blocks.update();
  timeline.restart();
}

// Numbers change at a pace at which they can be read, and only with news.
function wantNumbers() {
  if (numbersTimer) return;
  const wait = Math.max(0, numbersAt + NUMBERS_EVERY_MS - performance.now());
  numbersTimer = setTimeout(() => {
    numbersTimer = 0;
    numbersAt = performance.now();
    panels.update();
    showDetail();
    summarise();
  }, wait);
}

function showDetail() {
  const step = timeline.shown;
  const kicker = timeline.pinned ? "pinned step" : timeline.hovered ? "step" : "latest step";
  const hasFocus = $("#strip") === document.activeElement || $("#lanes") === document.activeElement;
  // Read out what the keyboard chose, not whatever comes.
  const isChosen = Boolean(timeline.pinned ?? timeline.hovered ?? timeline.request);
  detail.show(step, timeline.request, kicker, { isPolite: hasFocus && isChosen });
  blocks.highlight(timeline.request);
}

function summarise() {
  const steps = timeline.visibleSteps();
  const kinds = { context: 0, mixed: 0, generation: 0 };
  for (const step of steps) kinds[step.kind] += 1;
  write(
    $("#strip-summary"),
    `${steps.length} steps in view: ${kinds.context} context, ${kinds.mixed} mixed, ` +
      `${kinds.generation} generation. The latest is ${model.lastStep?.label ?? "none"}.`,
  );
  const unfinished = [...model.requests.values()].filter((one) => one.end === null).length;
  write($("#lanes-summary"), `${unfinished} requests unfinished.`);
  const notes = [];
  const { numHidden } = timeline.lanes;
  if (numHidden) notes.push(`${count(numHidden)} more are not drawn`);
  if (model.silent.length) {
    const which = `${model.silent.length > 1 ? "frontends" : "frontend"} ${model.silent.join(", ")}`;
    notes.push(`without the requests of ${which}, of which nothing is heard`);
  }
  if (model.numMissingSteps) notes.push(`${count(model.numMissingSteps)} steps are not known here`);
  if (model.numLostFrames) {
    notes.push(`${count(model.numLostFrames)} updates lost: this reader was too slow`);
  }
  write($("#lanes-note"), notes.join(" · "));
}

function showState() {
  let { state } = connection;
  if (state === "live" && model.phase !== "ready") state = model.phase;
  if (state === "dead") state = "ended";
  if (state === "live" && timeline.isPaused) state = "paused";
  $("#status").dataset.state = state;
  write($("#status-text"), STATES[state] ?? state);
  const needsKey = state === "key";
  $("#key-form").hidden = !needsKey;
  if (needsKey) {
    write($("#key-error"), authorization().Authorization ? connection.detail : "");
    $("#key").focus();
  }
  let notice = "";
  if (state === "ended") {
    const reason = connection.detail || "no reason is known";
    notice = `The engine is gone, and the page shows its last moments:\n${reason}`;
  } else if (state === "refused") notice = connection.detail;
  else if (state === "lost") notice = "The server does not answer; what is shown is as of then.";
  else if (state === "live" && !model.hasStatistics) {
    notice =
      "There is nothing to show: the server runs with --disable-log-stats, which switches off " +
      "what this page reads.";
  }
  write($("#notice"), notice);
  $("#notice").hidden = notice === "";
  $("#notice").dataset.state = state;
  document.body.dataset.state = state;
  $("#trace").hidden = !model.about?.has_debug_routes || state === "ended";
}

function showRecording() {
  const { recording } = model;
  const notes = recording === null ? [] : [`recording into ${recording}`];
  if (recording === null || recording === traceNote.runDir) notes.push(traceNote.text);
  const note = notes.filter(Boolean).join(" · ");
  const folder = recording ?? traceNote.runDir ?? "";
  write($("#trace-note"), shorten(note.replace(folder, folder.split("/").at(-1)), 44));
  $("#trace-note").title = note;
  $("#trace").dataset.recording = String(recording !== null);
  write($("#trace"), recording === null ? "Record trace" : "Stop trace");
}

function pause(isPaused) {
  timeline.pause(isPaused);
  $("#pause").setAttribute("aria-pressed", String(isPaused));
  write($("#pause"), isPaused ? "Resume" : "Pause");
  showState();
}

function choose(group, button) {
  for (const one of group.children) {
    one.setAttribute("aria-checked", String(one === button));
    one.tabIndex = one === button ? 0 : -1;
  }
  if (button.dataset.height) timeline.strip.height = button.dataset.height;
  if (button.dataset.span) timeline.spanUs = Number(button.dataset.span) * 1e6;
  timeline.refresh();
}

for (const group of document.querySelectorAll(".segments")) {
  const buttons = [...group.children];
  for (const button of buttons) {
    button.tabIndex = button.getAttribute("aria-checked") === "true" ? 0 : -1;
    button.addEventListener("click", () => choose(group, button));
  }
  group.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move) return;
    const at = (buttons.indexOf(document.activeElement) + move + buttons.length) % buttons.length;
    choose(group, buttons[at]);
    buttons[at].focus();
    event.preventDefault();
  });
}

$("#pause").addEventListener("click", () => pause(!timeline.isPaused));
document.addEventListener("keydown", (event) => {
  if (event.key !== " " || event.target.closest("button, input, a")) return;
  event.preventDefault();
  pause(!timeline.isPaused);
});

$("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("#key").value);
  $("#key").value = "";
  stream.retry();
});

$("#trace").addEventListener("click", async () => {
  const button = $("#trace");
  const { recording } = model;
  button.disabled = true;
  try {
    const response = await fetch(recording === null ? "start_trace" : "stop_trace", {
      method: "POST",
      headers: authorization(),
    });
    const answer = await response.json().catch(() => ({}));
    const problem = answer.error?.message ?? `status ${response.status}`;
    const lacking = answer.frontends?.note;
    const ended = recording === null ? "" : `recorded in ${answer.run_dir}`;
    if (response.ok) model.recording = recording === null ? answer.run_dir : null; // soon told
    traceNote = {
      runDir: answer.run_dir ?? recording,
      text: response.ok ? [ended, lacking].filter(Boolean).join(" · ") : problem,
    };
  } catch {
    traceNote = { runDir: recording, text: "the server does not answer" };
  } finally {
    button.disabled = false;
    showRecording();
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  timeline.refresh();
  panels.draw();
  blocks.draw();
});

// Curves move once a second, for as long as there is anything in their minute.
setInterval(() => {
  const isStale = connection.state !== "live" || document.hidden;
  const isQuiet = model.now - model.lastActivity > model.windowUs + 2e6;
  if (isStale || isQuiet || timeline.isPaused || !model.about) return;
  panels.tick();
  panels.update();
}, 1000);

window.isinglass = {
  model,
  panels,
  timeline,
  blocks,
  connection,
  /** What is shown, for tests and for the curious. */
  get state() {
    const shown = timeline.shown;
    return {
      connection: document.body.dataset.state,
      phase: model.phase,
      steps: model.steps.map(({ step, label, kind }) => [step, label, kind]),
      shown: shown && { step: shown.step, label: shown.label },
      numSnapshots: model.numSnapshots,
      numFrames: timeline.numFrames,
      latencies: panels.latencies,
      blocks: model.codes ? blocks.counts() : null,
      requests: [...model.requests.values()].map((one) => ({ ...one })),
      gaps: model.gaps,
      now: model.now,
    };
  },
};

stream.run();
