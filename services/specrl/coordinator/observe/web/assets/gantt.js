// The timeline: one lane of work per process. Only the visible lanes are drawn, and the coordinator sends no more points
// than a screen can show. So neither long runs nor many replicas slow the page down.

import { Surface } from "./canvas.js";
import { swatch } from "./chart.js";
import { colour, element, plural, seconds } from "./format.js";

const LEFT = 92, TOP = 26, RIGHT = 8, MOST_HEIGHT = 0.62;
export const LOOKS = {
  collect: { name: "exposed generation", colour: "generation" },
  train: { name: "train", colour: "train" },
  logprob: { name: "log-probabilities", colour: "logprob" },
  sync: { name: "weight sync", colour: "prepare" },
  commit: { name: "loading weights", colour: "prepare" },
  receive: { name: "receiving weights", colour: "prepare", isThin: true },
  canary: { name: "canary", colour: "data" },
  validation: { name: "validation", colour: "validation" },
  checkpoint: { name: "checkpoint", colour: "checkpoint" },
  write: { name: "writing the checkpoint", colour: "checkpoint", isThin: true },
  export: { name: "export", colour: "checkpoint" },
  replay: { name: "replay", colour: "logprob" },
  drafter: { name: "initialising the drafter", colour: "validation" },
  start: { name: "start", colour: "data" },
};

export class Gantt {
  constructor() {
    this.found = null;
    this.box = document.getElementById("gantt");
    this.space = document.getElementById("gantt-space");
    this.canvas = document.getElementById("gantt-canvas");
    this.tip = document.getElementById("gantt-tip");
    this.table = document.getElementById("timeline-table");
    this.surface = new Surface(this.canvas, () => Math.min(this.totalHeight(), MOST_HEIGHT * window.innerHeight),
      (pen, width, height) => this.paint(pen, width, height));
    this.box.addEventListener("scroll", () => this.surface.draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this.showTip(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.table.addEventListener("toggle", () => this.fillTable());
    document.getElementById("timeline-key").replaceChildren(
      ...["collect", "train", "logprob", "sync", "canary", "validation", "checkpoint"].map((kind) => makeKeyItem(LOOKS[kind])),
      makeKeyItem({ name: "rollouts in progress", colour: "busy" }), makeKeyItem({ name: "verdicts", colour: "verdict" }));
  }

  laneHeight() {
    const lanes = this.found?.lanes.length ?? 0;
    return lanes <= 12 ? 30 : lanes <= 24 ? 22 : 13;
  }

  totalHeight() {
    return TOP + 6 + Math.max(3, this.found?.lanes.length ?? 0) * this.laneHeight();
  }

  show(found) {
    this.found = found;
    this.most = Math.max(1, ...found.lanes.filter((lane) => lane !== "verifiers").flatMap((lane) => found.busy[lane] ?? []));
    this.space.style.height = `${this.totalHeight()}px`;
    const stretch = found.endedS - found.beganS, steps = found.steps;
    document.getElementById("timeline-words").textContent = steps.length
      ? `${steps.length > 1 ? `steps ${steps[0].step} to ${steps.at(-1).step}` : `step ${steps[0].step}`}, ${seconds(stretch)}; ` +
        `${plural(found.lanes.length, "lane")}`
      : found.bars.length ? `before the first step, ${seconds(stretch)}` : "no work since the coordinator's start";
    this.canvas.ariaLabel = `Timeline, ${document.getElementById("timeline-words").textContent}. ${this.describeWait()}`;
    this.fillTable();
    this.surface.draw();
  }

  // By lane: seconds of each kind of work, mean load, and idle seconds.
  sumByLane() {
    const { found } = this, stretch = found.endedS - found.beganS;
    return found.lanes.map((lane, place) => {
      const kinds = {};
      for (const [where, name, , began, ended] of found.bars) {
        if (where === place) kinds[name] = (kinds[name] ?? 0) + (Math.min(ended, 1000 * stretch) - Math.max(began, 0)) / 1000;
      }
      const busy = found.busy[lane], under = busy ? busy.reduce((sum, one) => sum + one, 0) / busy.length : null;
      const idle = busy ? (busy.filter((one) => one === 0).length / busy.length) * stretch : null;
      return { lane, kinds, under, idle };
    });
  }

  describeWait() {
    const trainer = this.sumByLane().find((one) => one.lane === "trainer");
    const waited = trainer?.kinds[this.found.names.indexOf("collect")] ?? 0;
    return `The trainer waited for rollouts for ${seconds(waited)}.`;
  }

  fillTable() {
    if (!this.table.open || !this.found) return;
    const rows = this.sumByLane().map(({ lane, kinds, under, idle }) => element("tr", {},
      element("th", { scope: "row" }, lane),
      element("td", { className: "number" }, under == null ? "–" : under.toFixed(1)),
      element("td", { className: "number" }, idle == null ? "–" : seconds(idle)),
      element("td", {}, Object.entries(kinds).map(([name, s]) => `${LOOKS[this.found.names[name]].name} ${seconds(s)}`).join(", "))));
    this.table.querySelector(".scroll").replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Lane"),
        element("th", { scope: "col", className: "number" }, "Mean in progress"), element("th", { scope: "col", className: "number" }, "Idle"),
        element("th", { scope: "col" }, "Work"))),
      element("tbody", {}, ...rows)));
  }

  paint(pen, width, height) {
    const { found } = this;
    if (!found) return;
    const scroll = this.box.scrollTop, lane = this.laneHeight(), stretch = Math.max(found.endedS - found.beganS, 1e-6);
    const inner = width - LEFT - RIGHT, x = (s) => LEFT + (s / stretch) * inner, y = (place) => TOP + place * lane - scroll;
    const first = Math.max(0, Math.floor((scroll - lane) / lane)), last = Math.min(found.lanes.length, Math.ceil((scroll + height) / lane));
    const pad = lane > 20 ? 4 : 1.5, tall = lane - 2 * pad;
    pen.save();
    pen.beginPath();
    pen.rect(0, TOP, width, height - TOP);
    pen.clip();
    // Tint all lanes while the trainer waits, so that the lanes it waits for stand out.
    pen.fillStyle = colour("tint");
    for (const [, name, , began, ended] of found.bars) {
      if (found.names[name] === "collect") pen.fillRect(x(began / 1000), TOP, Math.max(1, ((ended - began) / 1000 / stretch) * inner), height);
    }
    for (let place = first; place < last; place++) this.drawLoad(pen, found.lanes[place], y(place) + pad, tall, x, stretch);
    for (const [where, name, , began, ended, isOpen] of found.bars) {
      if (where < first || where >= last) continue;
      const look = LOOKS[found.names[name]], thin = look.isThin ? Math.max(2, tall * 0.16) : tall;
      const from = Math.max(LEFT, x(began / 1000)), to = Math.min(width - RIGHT, x(ended / 1000));
      pen.globalAlpha = isOpen ? 0.72 : 1;
      pen.fillStyle = colour(look.colour);
      pen.fillRect(from, y(where) + pad + (tall - thin), Math.max(to - from, 1.2), thin);
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("line");
    for (let place = first + 1; place < last; place++) pen.fillRect(0, Math.round(y(place)), width, 1);
    this.drawBoundaries(pen, x, height);
    pen.fillStyle = colour("paper");
    pen.fillRect(0, TOP, LEFT - 4, height);
    pen.textAlign = "left";
    pen.fillStyle = colour("ink");
    if (lane <= 14) pen.font = pen.font.replace("12px", "10.5px");
    for (let place = first; place < last; place++) pen.fillText(shorten(pen, found.lanes[place]), 2, y(place) + lane / 2 + 0.5);
    pen.restore();
    this.drawAxis(pen, x, stretch, width);
  }

  drawLoad(pen, name, top, tall, x, stretch) {
    const values = this.found.busy[name];
    if (!values) return;
    const most = name === "verifiers" ? Math.max(...values) : this.most, wide = stretch / values.length;
    pen.fillStyle = colour(name === "verifiers" ? "verdict" : "busy");
    values.forEach((value, place) => {
      if (!value) return;
      const high = Math.max(1.5, tall * Math.min(1, value / most)), from = x(place * wide);
      pen.fillRect(from, top + tall - high, x((place + 1) * wide) - from + 0.4, high);
    });
  }

  drawBoundaries(pen, x, height) {
    pen.fillStyle = colour("muted");
    pen.globalAlpha = 0.55;
    for (const step of this.found.steps) pen.fillRect(Math.round(x(step.beganS - this.found.beganS)), TOP, 1, height);
    pen.globalAlpha = 1;
  }

  drawAxis(pen, x, stretch, width) {
    pen.fillStyle = colour("paper");
    pen.fillRect(0, 0, width, TOP);
    pen.fillStyle = colour("muted");
    pen.textAlign = "left";
    let free = LEFT;
    for (const step of this.found.steps) {
      const from = Math.max(LEFT, x(step.beganS - this.found.beganS)), text = `step ${step.step}`;
      if (from < free || from + pen.measureText(text).width + 70 > width - RIGHT) continue;
      pen.fillText(text, from + 4, TOP / 2);
      free = from + pen.measureText(text).width + 70;
    }
    pen.textAlign = "right";
    pen.fillText(seconds(stretch), width - RIGHT, TOP / 2);
  }

  showTip(event) {
    const { found } = this;
    if (!found) return;
    const stretch = found.endedS - found.beganS, inner = this.canvas.clientWidth - LEFT - RIGHT;
    const at = ((event.offsetX - LEFT) / inner) * stretch, place = Math.floor((event.offsetY + this.box.scrollTop - TOP) / this.laneHeight());
    const lane = found.lanes[place];
    this.tip.hidden = lane == null || at < 0 || at > stretch || event.offsetY < TOP;
    if (this.tip.hidden) return;
    const hit = found.bars.findLast(([where, , , began, ended]) => where === place && began / 1000 <= at && ended / 1000 >= at);
    const values = found.busy[lane], under = values?.[Math.min(values.length - 1, Math.floor((at / stretch) * values.length))];
    const parts = [lane];
    if (hit) parts.push(`${LOOKS[found.names[hit[1]]].name} ${seconds((hit[4] - hit[3]) / 1000)}${hit[5] ? ", in progress" : ""}`);
    if (under != null) parts.push(`${under.toFixed(under < 10 ? 1 : 0)} ${lane === "verifiers" ? "verdicts" : "rollouts"} in progress`);
    this.tip.textContent = parts.join(" · ");
    this.tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 240)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }
}

function makeKeyItem(look) {
  return element("li", {}, swatch(look), look.name);
}

function shorten(pen, text) {
  if (pen.measureText(text).width <= LEFT - 10) return text;
  let cut = text;
  while (cut.length > 3 && pen.measureText(`…${cut}`).width > LEFT - 10) cut = cut.slice(1);
  return `…${cut}`;
}
