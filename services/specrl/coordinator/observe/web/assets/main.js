// The live page: reads the coordinator's stream, fetches the data that is in view, and draws it. It is read-only;
// /openapi.json describes the API that it uses.

import { Chart } from "./chart.js";
import { Connection, Refused, throttled } from "./connection.js";
import { clock, element, number, plural, seconds } from "./format.js";
import { Gantt } from "./gantt.js";
import { Events, PHASES, showHeadline, showStatus } from "./sections.js";

const POINTS = 240;
const byId = (id) => document.getElementById(id);
const now = { status: null, boot: "", lag: null, step: -1, version: "" };
const view = { until: null, steps: 4 };

// -- announcements for screen readers: at most one per 5 s, unless urgent ---------------------------------------------

let announced = 0;
function announce(text, isUrgent = false) {
  if (!isUrgent && performance.now() - announced < 5000) return;
  announced = performance.now();
  byId("announcer").textContent = text;
}

// -- the parts --------------------------------------------------------------------------------------------------------

// A seventh reward has the first colour again.
const REWARD_COLOURS = ["train", "validation", "logprob", "prepare", "data", "checkpoint"];

const gantt = new Gantt();
const events = new Events(announce);
const charts = {
  phases: new Chart({ title: "Seconds of a step, by phase", about: "Exposed generation, the part to reduce, is at the bottom.",
    kind: "stack", height: 240, isWide: true, format: seconds }),
  lag: new Chart({ title: "Policy lag", about: "Steps between a rollout's oldest token and the step that trained it. Never above maxPolicyLag." }),
  acceptance: new Chart({ title: "Acceptance length", about: "Mean tokens per verification, including the bonus token, and the mean draft length.", low: null }),
  positions: new Chart({ title: "Accepted drafts, by position", about: "Share of drafts whose token at this position was accepted.", high: 1 }),
  reward: new Chart({ title: "Reward and validation", about: "Mean reward of each step's rollouts, and of each validated version with its 95 % interval.", low: null }),
  rewards: new Chart({ title: "Rewards by name", about: "Mean of each reward before weighting, over the rollouts that it applies to. Dots: validated versions.", low: null }),
  sources: new Chart({ title: "Reward by source", about: "Mean reward of the rollouts of each training source.", low: null }),
  verdicts: new Chart({ title: "Failed verdicts", about: "Shares of a step's rollouts. No answer: the verifier found none. Verifier errors: it raised, crashed or timed out. Ungraded: sampled again." }),
  mismatch: new Chart({ title: "Drafter loss", about: "Loss of the drafter that is trained with the policy.", low: null }),
  length: new Chart({ title: "Rollout length", about: "Mean sampled tokens of a rollout. Longer rollouts need more generation." }),
};
byId("charts").append(...Object.values(charts).map((chart) => chart.figure));
const figureCharts = {};

const connection = new Connection({
  onBeat: showBeat,
  onEvent: (event) => events.add(event),
  onState: showState,
  onRefused: askForToken,
});

const askTimeline = throttled(async () => {
  const query = new URLSearchParams({ steps: view.steps, points: POINTS });
  if (view.until != null) query.set("until", view.until);
  const found = await connection.get(`/timeline?${query}`);
  gantt.show(found);
  const last = found.steps.at(-1)?.step ?? 0, first = found.steps[0]?.step ?? 0;
  Object.assign(view, { first, last });
  byId("earlier").disabled = first <= 1;
  byId("later").disabled = view.until == null;
}, 1000);

const askCurves = throttled(async () => {
  const range = Number(byId("curves-range").value), last = now.status?.step ?? 0;
  const first = range ? Math.max(1, last - range + 1) : 1;
  const found = await connection.get(`/curves?${new URLSearchParams({ first, points: POINTS })}`);
  byId("curves-words").textContent = !found.steps.length ? "no step is trained yet"
    : `${plural(found.steps.at(-1) - first + 1, "step")}` + (found.stride > 1 ? `, each point the mean of ${found.stride}` : "");
  drawCurves(found);
}, 2000);

function figureChart(name, about) {
  if (!figureCharts[name]) {
    const words = name.replaceAll("_", " ");
    figureCharts[name] = new Chart({ title: words[0].toUpperCase() + words.slice(1), about, low: null });
    byId("charts").append(figureCharts[name].figure);
  }
  return figureCharts[name];
}

function drawCurves({ steps, stride, phases, numbers, rewards, validationRewards, sourceRewards, figures }) {
  const line = (name, values, colour, more = {}) => ({ name, values, colour, ...more });
  charts.phases.show(steps, stride, PHASES.map(([phase, name]) => line(name, phases[phase], phase, { isAlways: phase === "generation" })));
  charts.lag.show(steps, stride, [
    line("mean", numbers.policy_lag_mean, "train"), line("largest", numbers.policy_lag_max, "logprob"),
    ...(now.lag == null ? [] : [line("bound", steps.map(() => now.lag), "muted", { kind: "dash" })])]);
  charts.acceptance.show(steps, stride, [line("acceptance length", numbers.acceptance_length, "train"), line("draft length", numbers.draft_length, "logprob")]);
  const positions = Object.keys(numbers).filter((name) => name.startsWith("accepted_"));
  charts.positions.show(steps, stride, positions.map((name, place) =>
    line(name.slice("accepted_".length), numbers[name], "train", { alpha: 1 - (0.75 * place) / Math.max(positions.length - 1, 1) })));
  charts.reward.show(steps, stride, [line("reward", numbers.reward, "train"), line("validation", numbers.validation_reward, "validation", { kind: "points" }),
    line("low", numbers.validation_low, "validation", { kind: "points", alpha: 0.35 }), line("high", numbers.validation_high, "validation", { kind: "points", alpha: 0.35 })]);
  charts.rewards.show(steps, stride, Object.keys(rewards).flatMap((name, place) => {
    const colour = REWARD_COLOURS[place % REWARD_COLOURS.length];
    return [line(name, rewards[name], colour), line(`${name}, validated`, validationRewards[name], colour, { kind: "points" })];
  }));
  charts.sources.show(steps, stride, Object.keys(sourceRewards).map((name, place) =>
    line(name, sourceRewards[name], REWARD_COLOURS[place % REWARD_COLOURS.length])));
  charts.verdicts.show(steps, stride, [line("no answer", numbers.no_answer_share, "train"), line("verifier errors", numbers.verifier_error_share, "validation"),
    line("ungraded", numbers.ungraded_share, "logprob")]);
  charts.mismatch.show(steps, stride, [line("loss", numbers.drafter_loss, "train")]);
  charts.length.show(steps, stride, [line("tokens", numbers.mean_length, "train")]);
  for (const [name, about] of Object.entries(figures)) figureChart(name, about).show(steps, stride, [line(name, numbers[name], "train")]);
}

// -- handlers of the stream -------------------------------------------------------------------------------------------

function showBeat({ boot, status, exposure }) {
  if (now.boot && boot !== now.boot) {
    events.clear();
    view.until = null;
    announce("The coordinator was restarted. The timeline starts again.", true);
  }
  const isFirst = boot !== now.boot;
  if (now.status && now.status.phase !== status.phase) announce(`The run is ${status.phase}.`, true);
  if (now.status && now.status.isPaused !== status.isPaused) announce(status.isPaused ? "The run is paused." : "The run is resumed.", true);
  Object.assign(now, { status, boot });
  showStatus(status);
  showHeadline(exposure);
  if (isFirst) { loadSpec(); lookForRollouts(); }
  if (isFirst || status.step !== now.step) { now.step = status.step; askCurves(); }
  if (view.until == null) askTimeline();
}

function showState(name, reason) {
  const box = byId("connection");
  if (name !== box.dataset.state) {
    if (name === "lost") announce("Connection lost; reconnecting.", true);
    else if (box.dataset.state === "lost") announce("Reconnected.", true);
  }
  if (name === "lost" && box.dataset.state === "live") box.dataset.since = clock(Date.now() / 1000);
  box.dataset.state = name;
  byId("connection-text").textContent = name === "live" ? "live"
    : `${reason}; reconnecting${box.dataset.since ? `. This page shows the run at ${box.dataset.since}` : ""}`;
}

function askForToken(message) {
  const form = byId("token-form");
  form.hidden = false;
  byId("token").focus();
  announce(message, true);
  return new Promise((done) => form.addEventListener("submit", (event) => {
    event.preventDefault();
    connection.useToken(byId("token").value.trim());
    byId("token").value = "";
    form.hidden = true;
    done();
  }, { once: true }));
}

// Without a change there is no beat, but work in progress still grows: redraw the timeline every second.
setInterval(() => {
  const isGoing = now.status && !["finished", "failed", "stopped"].includes(now.status.phase);
  if (isGoing && view.until == null && !document.hidden && byId("connection").dataset.state === "live") askTimeline();
}, 1000);

// -- user input -------------------------------------------------------------------------------------------------------

async function loadSpec() {
  try {
    const text = await connection.get("/spec", "text");
    byId("spec").querySelector("pre").textContent = text;
    now.lag = Number(/^ {2}maxPolicyLag: (\d+)/m.exec(text)?.[1] ?? NaN);
    if (Number.isNaN(now.lag)) now.lag = null;
    askCurves();
  } catch { /* fetched again when the coordinator is restarted */ }
}

async function lookForRollouts() {
  const box = byId("rollouts");
  if (!/^ {2}rolloutsShown: [1-9]/m.test(await connection.get("/spec", "text").catch(() => ""))) return;
  box.hidden = false;
  box.addEventListener("toggle", async () => {
    if (!box.open) return;
    const found = await fetchRollouts();
    box.querySelector("div").replaceChildren(...found.map((one) => element("article", {},
      element("p", { className: "caption" }, `${one.id} · ${one.replica} · versions ${one.oldestVersion} to ${one.newestVersion} · ` +
        `${plural(one.tokens, "token")} in ${seconds(one.seconds)}`),
      verdict(one), element("pre", {}, one.prompt), element("pre", {}, one.completion))));
  });
}

// On one machine this is the only read that needs the token. The form asks for it, and for another one if it is wrong.
async function fetchRollouts() {
  if (!connection.token) await askForToken("prompts and completions are shown only to whoever has the run's token");
  for (;;) {
    try {
      return await connection.get("/rollouts?limit=12");
    } catch (error) {
      if (!(error instanceof Refused)) return [];
      await askForToken(error.message);
    }
  }
}

// The reward, the extracted answer and the verifier's reason. As text nodes: the policy may have written HTML.
function verdict({ reward, extracted, reason }) {
  const made = element("p", { className: "verdict" }, `reward ${number(reward)}`);
  if (extracted) made.append(" for ", element("code", {}, extracted));
  if (reason) made.append(`: ${reason}`);
  return made;
}

function showSteps(until, steps = view.steps) {
  Object.assign(view, { until, steps });
  byId("follow").setAttribute("aria-pressed", String(until == null));
  byId("timeline-steps").value = String(steps);
  askTimeline();
}

function showEarlier() {
  if ((view.first ?? 0) > 1) showSteps(Math.max(view.steps, view.first - 1));
}

function showLater() {
  if (view.until == null) return;
  const next = view.until + view.steps;
  showSteps(next >= (now.status?.step ?? 0) ? null : next);
}

function changeZoom(direction) {
  const choices = [...byId("timeline-steps").options].map((option) => Number(option.value));
  const place = choices.indexOf(view.steps) + direction;
  if (place >= 0 && place < choices.length) showSteps(view.until, choices[place]);
}

byId("earlier").addEventListener("click", showEarlier);
byId("later").addEventListener("click", showLater);
byId("follow").addEventListener("click", () => showSteps(view.until == null ? (now.status?.step || null) : null));
byId("timeline-steps").addEventListener("change", (event) => showSteps(view.until, Number(event.target.value)));
byId("curves-range").addEventListener("change", askCurves);
byId("gantt").addEventListener("keydown", (event) => {
  const act = { ArrowLeft: showEarlier, ArrowRight: showLater, "+": () => changeZoom(-1), "=": () => changeZoom(-1), "-": () => changeZoom(1) }[event.key];
  if (act) { event.preventDefault(); act(); }
});

connection.run();
