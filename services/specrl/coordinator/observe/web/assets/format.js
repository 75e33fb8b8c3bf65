// Formats numbers and times. Everything becomes text: nothing from the run is ever parsed as HTML.

export function seconds(value) {
  if (value == null) return "–";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  if (value >= 0.1) return `${value.toFixed(2)} s`;
  return value === 0 ? "0 s" : `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

export function number(value, digits = 3) {
  if (value == null) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  const value = 100 * share;
  return value < 9.95 && value >= 0.05 ? value.toFixed(1) : value.toFixed(0);
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

// replicaMoved, replica_moved -> replica moved
export function words(name) {
  return name.replace(/_/g, " ").replace(/([a-z])([A-Z])/g, (_, a, b) => `${a} ${b.toLowerCase()}`);
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

// Create an element with properties and children. Strings become text nodes.
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
