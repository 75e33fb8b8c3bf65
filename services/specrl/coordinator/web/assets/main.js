// The live page: listens to the coordinator's stream, asks for what is in view, and draws it. It decides nothing and can
// change nothing; see /openapi.json for the same by hand.

import { Chart } from "./chart.js";
import { Connection, throttled } from "./connection.js";
import { clock, element, number, plural, seconds } from "./format.js";
import { Gantt } from "./gantt.js";
import { Events, STAGES, showHeadline, showStatus } from "./sections.js";

const POINTS = 240;
const byId = (id) => document.getElementById(id);
const now = { status: null, boot: "", lag: null, step: -1, version: "" };
const view = { until: null, steps: 4 };

// -- for screen readers: what changes rarely and matters; at most one sentence in 5 s ---------------------------------

let announced = 0;
function announce(text, isUrgent = false) {
  if (!isUrgent && performance.now() - announced < 5000) return;
  announced = performance.now();
  byId("announcer").textContent = text;
}

// -- the parts --------------------------------------------------------------------------------------------------------

const gantt = new Gantt();
const events = new Events(announce);
const charts = {
  stages: new Chart({ title: "Seconds of a step, by stage", about: "Exposed generation stands on the ground line: that is the part to make small.",
    kind: "stack", height: 240, isWide: true, format: seconds }),
  lag: new Chart({ title: "Policy lag", about: "Steps between a rollout's oldest token and its training; never above maxPolicyLag." }),
  acceptance: new Chart({ title: "Acceptance length", about: "Tokens per verification, the bonus token included, and the draft length k that was chosen.", low: null }),
  positions: new Chart({ title: "Accepted drafts, by position", about: "Share of drafts whose token at this position was accepted.", high: 1 }),
  reward: new Chart({ title: "Reward and validation", about: "Mean reward of the step's rollouts; mean reward of the validated versions, with its 95 % interval.", low: null }),
  verdicts: new Chart({ title: "Verdicts on no answer", about: "Shares of a step's rollouts: no answer was found; the verifier raised, or the answer ended it; no verdict, sampled again." }),
  mismatch: new Chart({ title: "Drafter's loss", about: "Of the drafter that is trained beside the policy.", low: null }),
  length: new Chart({ title: "Length of a rollout", about: "Mean sampled tokens: longer rollouts need more generation." }),
};
byId("charts").append(...Object.values(charts).map((chart) => chart.figure));

const connection = new Connection({
  onBeat: beat,
  onEvent: (event) => events.add(event),
  onState: state,
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

function drawCurves({ steps, stride, stages, numbers }) {
  const line = (name, values, colour, more = {}) => ({ name, values, colour, ...more });
  charts.stages.show(steps, stride, STAGES.map(([stage, name]) => line(name, stages[stage], stage, { isAlways: stage === "generation" })));
  charts.lag.show(steps, stride, [
    line("mean", numbers.policy_lag_mean, "train"), line("largest", numbers.policy_lag_max, "logprob"),
    ...(now.lag == null ? [] : [line("bound", steps.map(() => now.lag), "muted", { kind: "dash" })])]);
  charts.acceptance.show(steps, stride, [line("acceptance length", numbers.acceptance_length, "train"), line("draft length", numbers.draft_length, "logprob")]);
  const positions = Object.keys(numbers).filter((name) => name.startsWith("accepted_"));
  charts.positions.show(steps, stride, positions.map((name, place) =>
    line(name.slice("accepted_".length), numbers[name], "train", { alpha: 1 - (0.75 * place) / Math.max(positions.length - 1, 1) })));
  charts.reward.show(steps, stride, [line("reward", numbers.reward, "train"), line("validation", numbers.validation_reward, "validation", { kind: "points" }),
    line("at least", numbers.validation_low, "validation", { kind: "points", alpha: 0.35 }), line("at most", numbers.validation_high, "validation", { kind: "points", alpha: 0.35 })]);
  charts.verdicts.show(steps, stride, [line("no answer", numbers.no_answer_share, "train"), line("verifier errors", numbers.verifier_error_share, "validation"),
    line("ungraded", numbers.ungraded_share, "logprob")]);
  charts.mismatch.show(steps, stride, [line("loss", numbers.drafter_loss, "train")]);
  charts.length.show(steps, stride, [line("tokens", numbers.mean_length, "train")]);
}

// -- what the stream says ---------------------------------------------------------------------------------------------

function beat({ boot, status, exposure }) {
  if (now.boot && boot !== now.boot) {
    events.clear();
    view.until = null;
    announce("The coordinator was started again; its timeline begins anew.", true);
  }
  const isFirst = boot !== now.boot;
  if (now.status && now.status.phase !== status.phase) announce(`The run is ${status.phase}.`, true);
  if (now.status && now.status.isPaused !== status.isPaused) announce(status.isPaused ? "The run is paused." : "The run goes on.", true);
  Object.assign(now, { status, boot });
  showStatus(status);
  showHeadline(exposure);
  if (isFirst) { loadSpec(); lookForRollouts(); }
  if (isFirst || status.step !== now.step) { now.step = status.step; askCurves(); }
  if (view.until == null) askTimeline();
}

function state(name, reason) {
  const box = byId("connection");
  if (name !== box.dataset.state) {
    if (name === "lost") announce("Connection lost; trying again.", true);
    else if (box.dataset.state === "lost") announce("Connected again.", true);
  }
  if (name === "lost" && box.dataset.state === "live") box.dataset.since = clock(Date.now() / 1000);
  box.dataset.state = name;
  byId("connection-text").textContent = name === "live" ? "live"
    : `${reason}; trying again${box.dataset.since ? `. Shown is what was so at ${box.dataset.since}` : ""}`;
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

// While nothing changes, time goes on: the lanes under way grow.
setInterval(() => {
  const isGoing = now.status && !["finished", "failed", "stopped"].includes(now.status.phase);
  if (isGoing && view.until == null && !document.hidden && byId("connection").dataset.state === "live") askTimeline();
}, 1000);

// -- what is asked for by hand ----------------------------------------------------------------------------------------

async function loadSpec() {
  try {
    const text = await connection.get("/spec", "text");
    byId("spec").querySelector("pre").textContent = text;
    now.lag = Number(/^ {2}maxPolicyLag: (\d+)/m.exec(text)?.[1] ?? NaN);
    if (Number.isNaN(now.lag)) now.lag = null;
    askCurves();
  } catch { /* asked for again with the next start of the coordinator */ }
}

async function lookForRollouts() {
  const box = byId("rollouts");
  if (!/^ {2}rolloutsShown: [1-9]/m.test(await connection.get("/spec", "text").catch(() => ""))) return;
  box.hidden = false;
  box.addEventListener("toggle", async () => {
    if (!box.open) return;
    const found = await connection.get("/rollouts?limit=12").catch(() => []);
    box.querySelector("div").replaceChildren(...found.map((one) => element("article", {},
      element("p", { className: "caption" }, `${one.id} · ${one.replica} · versions ${one.oldestVersion} to ${one.newestVersion} · ` +
        `${plural(one.tokens, "token")} in ${seconds(one.seconds)}`),
      verdict(one), element("pre", {}, one.prompt), element("pre", {}, one.completion))));
  });
}

// The reward, what the verifier took for the answer, and why: as text, whatever the policy wrote.
function verdict({ reward, extracted, reason }) {
  const made = element("p", { className: "verdict" }, `reward ${number(reward)}`);
  if (extracted) made.append(" for ", element("code", {}, extracted));
  if (reason) made.append(`: ${reason}`);
  return made;
}

function go(until, steps = view.steps) {
  Object.assign(view, { until, steps });
  byId("follow").setAttribute("aria-pressed", String(until == null));
  byId("timeline-steps").value = String(steps);
  askTimeline();
}

function earlier() {
  if ((view.first ?? 0) > 1) go(Math.max(view.steps, view.first - 1));
}

function later() {
  if (view.until == null) return;
  const next = view.until + view.steps;
  go(next >= (now.status?.step ?? 0) ? null : next);
}

function zoom(direction) {
  const choices = [...byId("timeline-steps").options].map((option) => Number(option.value));
  const place = choices.indexOf(view.steps) + direction;
  if (place >= 0 && place < choices.length) go(view.until, choices[place]);
}

byId("earlier").addEventListener("click", earlier);
byId("later").addEventListener("click", later);
byId("follow").addEventListener("click", () => go(view.until == null ? (now.status?.step || null) : null));
byId("timeline-steps").addEventListener("change", (event) => go(view.until, Number(event.target.value)));
byId("curves-range").addEventListener("change", askCurves);
byId("gantt").addEventListener("keydown", (event) => {
  const act = { ArrowLeft: earlier, ArrowRight: later, "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1) }[event.key];
  if (act) { event.preventDefault(); act(); }
});

connection.run();
