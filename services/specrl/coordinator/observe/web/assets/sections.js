// The text and tables of the page: headline, status, replicas, events, counters.

import { swatch } from "./chart.js";
import { clock, element, number, percent, plural, seconds, words } from "./format.js";

const EVENTS_SHOWN = 150;
const REPLICAS_SHOWN = 128;
const byId = (id) => document.getElementById(id);

// In stacking order. Exposed generation comes first, so that it is at the bottom of each bar and easy to compare.
export const PHASES = [
  ["generation", "exposed generation"], ["logprob", "log-probabilities"], ["train", "train"], ["prepare", "weight sync"],
  ["validation", "waiting for validation"], ["checkpoint", "checkpoint"], ["data", "data"],
];

export function showHeadline(exposure) {
  byId("share").textContent = exposure.steps ? percent(exposure.share) : "–";
  byId("share-words").textContent = exposure.steps
    ? `of the last ${plural(exposure.steps, "step")} the trainer had no batch: ${seconds(exposure.seconds.bufferWait)} per step ` +
      "for too few sampled rollouts" +
      (exposure.seconds.grading > 0.0005 ? `, ${seconds(exposure.seconds.grading)} for their grading` : "") +
      (exposure.seconds.syncDrain > 0.0005 ? `, ${seconds(exposure.seconds.syncDrain)} while new replicas received weights` : "")
    : "of a step's time the trainer waits for rollouts";
  byId("hidden-words").textContent = exposure.steps
    ? `Generation is under way for ${seconds(exposure.generationUnderWay)} of a step; ${seconds(exposure.hiddenGeneration)} of them are ` +
      "hidden, because the trainer does not wait."
    : "";
  byId("step-seconds").textContent = exposure.steps ? `${seconds(exposure.stepSeconds)} each, mean of the last ${exposure.steps}` : "";
  byId("advice").textContent = exposure.advice;
  const total = exposure.stepSeconds || 1;
  byId("phase-bar").replaceChildren(...PHASES.filter(([phase]) => exposure.phases[phase] > 0).map(([phase]) => {
    const part = element("span");
    part.style.background = `var(--${phase})`;
    part.style.width = `${(100 * exposure.phases[phase]) / total}%`;
    return part;
  }));
  byId("phases").tBodies[0].replaceChildren(...PHASES.map(([phase, name]) => element("tr",
    { className: phase === "generation" ? "is-exposed" : "" },
    element("th", { scope: "row" }, swatch({ colour: phase }), name),
    element("td", {}, seconds(exposure.phases[phase])),
    element("td", {}, `${percent(exposure.phases[phase] / total)} %`))));
}

export function showStatus(status) {
  document.title = `${status.run} · step ${status.step}`;
  byId("run").textContent = status.run;
  const detail = status.detail && status.detail !== status.phase ? `: ${status.detail}` : "";
  byId("phase").textContent = `${status.isPaused ? "paused" : status.phase}${status.isPaused ? "" : detail} · step ${status.step} of ` +
    `${status.steps} · policy version ${status.policyVersion < 0 ? "none yet" : status.policyVersion}`;
  byId("progress").max = Math.max(status.steps, 1);
  byId("progress").value = status.step;
  showReplicas(status);
  const facts = { trainer: status.trainer, "newest checkpoint": status.checkpointStep ? `step ${status.checkpointStep}` : "none",
    "rollouts of the next step": status.rolloutsWanted ? `${status.rolloutsCollected} of ${status.rolloutsWanted}` +
      (status.rolloutsGrading ? ` (${status.rolloutsGrading} being graded)` : "") : "–" };
  for (const [name, count] of Object.entries(status.counters)) if (count) facts[words(name)] = String(count);
  for (const [name, reasons] of [["verdicts failed by reason", status.verdictFailures], ["prompts given up by reason", status.givenUp]]) {
    const counted = Object.entries(reasons).map(([reason, count]) => `${reason} (${count})`);
    if (counted.length) facts[name] = counted.join(", ");
  }
  const lost = Object.entries(status.replicasGivenUp).map(([replica, reason]) => `${replica}: ${reason}`);
  if (lost.length) facts["why replicas were given up"] = lost.join("; ");
  if (status.warnings.length) facts.warnings = status.warnings.join("; ");
  if (status.error) facts.error = status.error;
  byId("counters").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const SOUND = { serving: "", draining: "is-moving", updating: "is-moving", joining: "is-moving", catchingUp: "is-moving" };

function showReplicas(status) {
  const serving = status.replicas.filter((one) => one.state === "serving" || one.state === "updating").length;
  const live = status.replicas.reduce((sum, one) => sum + one.liveRollouts, 0);
  byId("replicas-words").textContent = `${serving} of ${status.replicasWanted ?? status.replicas.length} serving; ${plural(live, "rollout")} in progress`;
  const shown = [...status.replicas] // replicas in an abnormal state first
    .sort((a, b) => (a.state in SOUND) - (b.state in SOUND) || a.id.localeCompare(b.id, undefined, { numeric: true }))
    .slice(0, REPLICAS_SHOWN);
  const figure = (text) => element("td", { className: "number" }, text);
  byId("replica-table").tBodies[0].replaceChildren(...shown.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.id),
    element("td", {}, element("span", { className: `state ${SOUND[one.state] ?? "is-troubled"}` }, words(one.state))),
    figure(one.policyVersion < 0 ? "–" : String(one.policyVersion)),
    figure(one.drafterVersion < 0 ? "–" : String(one.drafterVersion)),
    figure(String(one.liveRollouts)),
    figure(one.measuredGain == null ? "–" : `${one.measuredGain.toFixed(2)}×`),
    figure(number(one.canaryMeanAbs, 2)),
    element("td", {}, one.reason))));
}

export class Events {
  constructor(announce) {
    this.announce = announce;
    this.kept = [];
    byId("troubles").addEventListener("change", () => this.draw());
  }

  clear() {
    this.kept = [];
    this.draw();
  }

  add(event) {
    this.kept.push(event);
    if (this.kept.length > 500) this.kept.shift();
    if (event.level !== "info") this.announce(`${event.level}: ${words(event.name)}`);
    // Redraw at most four times per second, however many events arrive.
    if (!this.isAsked) {
      this.isAsked = true;
      setTimeout(() => { this.isAsked = false; this.draw(); }, 250);
    }
  }

  draw() {
    const chosen = byId("troubles").checked ? this.kept.filter((one) => one.level !== "info") : this.kept;
    byId("events-words").textContent = `${plural(chosen.length, "event")} since the coordinator's start, newest first; the log has all events`;
    byId("event-list").replaceChildren(...chosen.slice(-EVENTS_SHOWN).reverse().map((event) => element("li", { className: event.level },
      element("time", { dateTime: new Date(1000 * event.atS).toISOString() }, clock(event.atS)),
      element("span", { className: "what" }, words(event.name)),
      element("span", { className: "facts" }, Object.entries(event.facts).filter(([, value]) => value !== "")
        .map(([name, value]) => `${words(name)} ${typeof value === "number" ? number(value) : value}`).join(" · ")))));
  }
}
