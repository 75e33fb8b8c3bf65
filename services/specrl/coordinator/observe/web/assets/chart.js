// One figure over steps: curves or stacked bars, with the newest values, a cursor, and the same numbers as a table.

import { Surface, ticks } from "./canvas.js";
import { colour, element, number } from "./format.js";

const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;
const TABLE_ROWS = 60;

// show(steps, stride, series): series is [{name, colour, values, kind, alpha, isAlways}], with one value per step.
// kind: "dash" or "points"; a line without. isAlways: name the series in a stack although it is near zero.
export class Chart {
  constructor({ title, about, unit = "", kind = "lines", height = 170, isWide = false, low = 0, high = null, format = number }) {
    Object.assign(this, { unit, kind, height, low, high, format, steps: [], stride: 1, series: [], at: null });
    this.now = element("span", { className: "now" });
    this.canvas = element("canvas", { role: "img", ariaLabel: title });
    this.table = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `${title}, as a table` });
    this.details = element("details", {}, element("summary", {}, "Numbers"), this.table);
    this.figure = element("figure", { className: isWide ? "wide" : "" },
      element("figcaption", {}, element("h3", {}, title), this.now), element("div", {}, this.canvas),
      element("p", { className: "about" }, about), this.details);
    this.title = title;
    this.surface = new Surface(this.canvas, () => this.height, (pen, width, height) => this.paint(pen, width, height));
    this.details.addEventListener("toggle", () => this.showValues());
    this.canvas.addEventListener("pointermove", (event) => this.moveCursor(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.moveCursor(null));
  }

  show(steps, stride, series) {
    Object.assign(this, { steps, stride, series: series.filter((one) => one.values.some((value) => value != null)) });
    this.figure.hidden = !this.series.length && this.kind !== "stack";
    this.showValues();
    this.surface.draw();
  }

  moveCursor(x) {
    const width = this.canvas.clientWidth - LEFT - RIGHT, count = this.steps.length;
    const share = (x - LEFT) / width;
    const at = x == null || !count ? null : this.kind === "stack" ? Math.floor(share * count) : Math.round(share * (count - 1));
    this.at = at == null ? null : Math.max(0, Math.min(count - 1, at));
    this.showValues();
    this.surface.draw();
  }

  // Write the values under the cursor, or else the newest ones, above the figure and into its label for screen readers.
  showValues() {
    const at = this.at ?? this.steps.length - 1;
    const shown = this.series.map((one) => [one, this.at == null ? lastKnown(one.values) : one.values[at]]);
    const parts = shown.filter(([one, value]) => value != null && (this.kind !== "stack" || value > 0.0005 || one.isAlways))
      .map(([one, value]) => element("span", {}, swatch(one), `${one.name} `, element("b", {}, this.format(value)), this.unit, "  "));
    const last = this.steps[at];
    const which = last == null ? "" : this.stride > 1 ? `steps ${Math.max(1, last - this.stride + 1)}–${last}  ` : `step ${last}  `;
    this.now.replaceChildren(this.at == null ? "" : which, ...parts);
    this.canvas.ariaLabel = `${this.title}: ${shown.map(([one, value]) => `${one.name} ${this.format(value)}${this.unit}`).join(", ")}`;
    if (this.details.open) this.fillTable();
  }

  fillTable() {
    const every = Math.max(1, Math.ceil(this.steps.length / TABLE_ROWS));
    const rows = this.steps.map((step, place) => [step, place]).filter(([, place]) => (this.steps.length - 1 - place) % every === 0);
    const cell = (text) => element("td", { className: "number" }, text);
    this.table.replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Step"),
        ...this.series.map((one) => element("th", { scope: "col", className: "number" }, one.name)))),
      element("tbody", {}, ...rows.reverse().map(([step, place]) => element("tr", {}, element("th", { scope: "row" }, String(step)),
        ...this.series.map((one) => cell(this.format(one.values[place]))))))));
  }

  paint(pen, width, height) {
    const inner = { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM };
    const ink = colour("muted"), line = colour("line"), count = this.steps.length;
    const sums = this.steps.map((_, place) => this.series.reduce((sum, one) => sum + (one.values[place] ?? 0), 0));
    const known = this.kind === "stack" ? sums : this.series.flatMap((one) => one.values).filter((value) => value != null);
    const low = this.low ?? Math.min(...known, 0), top = Math.max(low, ...known);
    const high = this.high ?? (top > low ? top + 0.06 * (top - low) : low + 1);
    const y = (value) => inner.y + inner.height * (1 - (value - low) / (high - low || 1));
    const x = (place) => inner.x + inner.width * (this.kind === "stack" ? (place + 0.5) / count : count > 1 ? place / (count - 1) : 0.5);
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of ticks(low, high, height > 200 ? 5 : 3)) {
      pen.fillStyle = line;
      pen.fillRect(inner.x, Math.round(y(tick)), inner.width, 1);
      pen.fillStyle = ink;
      pen.fillText(this.format(tick), inner.x - 8, y(tick));
    }
    pen.textAlign = "center";
    if (count) {
      for (const tick of ticks(this.steps[0], this.steps[count - 1], Math.max(2, Math.floor(inner.width / 110)))) {
        if (!Number.isInteger(tick) || tick < 1) continue;
        const place = count > 1 ? ((tick - this.steps[0]) / (this.steps[count - 1] - this.steps[0])) * (count - 1) : 0;
        const text = String(tick), half = pen.measureText(text).width / 2;
        pen.fillText(text, Math.min(x(place), width - half), height - 8);
      }
    }
    if (this.kind === "stack") this.stack(pen, inner, y, count);
    else for (const one of this.series) this.curve(pen, one, x, y);
    if (this.at != null && count) {
      pen.fillStyle = colour("ink");
      pen.fillRect(Math.round(x(this.at)), inner.y, 1, inner.height);
    }
  }

  stack(pen, inner, y, count) {
    const width = inner.width / Math.max(count, 1), gap = width > 6 ? 1 : 0;
    for (let place = 0; place < count; place++) {
      let below = 0;
      for (const one of this.series) {
        const value = one.values[place] ?? 0;
        if (value <= 0) continue;
        pen.fillStyle = colour(one.colour);
        const top = y(below + value), bottom = y(below);
        pen.fillRect(inner.x + place * width, top, width - gap, Math.max(bottom - top, 0.5));
        below += value;
      }
    }
  }

  curve(pen, one, x, y) {
    pen.strokeStyle = pen.fillStyle = colour(one.colour);
    pen.globalAlpha = one.alpha ?? 1;
    pen.lineWidth = one.kind === "dash" ? 1 : 1.75;
    pen.setLineDash(one.kind === "dash" ? [4, 4] : []);
    pen.lineJoin = "round";
    pen.beginPath();
    let isDown = false;
    one.values.forEach((value, place) => {
      if (value == null) { if (one.kind !== "points") isDown = false; return; }
      if (isDown) pen.lineTo(x(place), y(value));
      else pen.moveTo(x(place), y(value));
      isDown = true;
    });
    pen.stroke();
    pen.setLineDash([]);
    if (one.kind === "points" || this.steps.length === 1) {
      one.values.forEach((value, place) => {
        if (value == null) return;
        pen.beginPath();
        pen.arc(x(place), y(value), 3.25, 0, 7);
        pen.fill();
      });
    }
    pen.globalAlpha = 1;
  }
}

export function swatch(one) {
  const made = element("span", { className: "swatch", ariaHidden: "true" });
  made.style.background = `var(--${one.colour})`;
  made.style.opacity = one.alpha ?? 1;
  return made;
}

function lastKnown(values) {
  for (let place = values.length - 1; place >= 0; place--) if (values[place] != null) return values[place];
  return null;
}
