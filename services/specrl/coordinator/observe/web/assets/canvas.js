// A canvas that fills its container at the screen's resolution. It is redrawn when its size or the colour scheme changes.

const FONT = '12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const redraws = new Set();

export class Surface {
  constructor(canvas, heightOf, draw) {
    Object.assign(this, { canvas, heightOf, paint: draw, isAsked: false });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    redraws.add(this);
  }

  // Redraw in the next frame. Calls before that frame are merged into one.
  draw() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      const width = this.canvas.clientWidth, height = this.heightOf(), scale = window.devicePixelRatio || 1;
      if (!width) return;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      const pen = this.canvas.getContext("2d");
      pen.scale(scale, scale);
      pen.font = FONT;
      pen.textBaseline = "middle";
      this.paint(pen, width, height);
    });
  }
}

function drawAll() {
  for (const surface of redraws) surface.draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
window.addEventListener("resize", drawAll);

// Round numbers between `low` and `high`, about `count` of them.
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}
