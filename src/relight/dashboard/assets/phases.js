// Phases by their number on the position page (core/protocol/position.py), with the names and colours of `relight timeline`.

export const PHASES = [
  { name: "STARTING", words: "starting", letter: "s", colour: "--starting" },
  { name: "OUTSIDE", words: "between steps", letter: "·", colour: "--outside" },
  { name: "FORWARD", words: "Forward", letter: "F", colour: "--forward" },
  { name: "BACKWARD", words: "Backward", letter: "B", colour: "--backward", texture: "lines" },
  { name: "BARRIER", words: "Barrier", letter: "|", colour: "--barrier" },
  { name: "OPTIMIZER", words: "Optimizer step", letter: "O", colour: "--optimizer", texture: "grid" },
  { name: "PARKED", words: "paused", letter: "p", colour: "--parked", texture: "dots" },
  { name: "STANDBY", words: "standby", letter: "s", colour: "--outside" },
  { name: "DONE", words: "done", letter: "d", colour: "--done" },
];
export const [STARTING, OUTSIDE, FORWARD, BACKWARD, BARRIER, OPTIMIZER, PARKED, STANDBY, DONE] = PHASES.keys();
export const NOTHING = 255;
export const WORDS = { DEAD: "no process", ...Object.fromEntries(PHASES.map((phase) => [phase.name, phase.words])) };
export const LEGEND = [FORWARD, BACKWARD, BARRIER, OPTIMIZER, OUTSIDE, PARKED].map((code) => [PHASES[code].name, PHASES[code].words]);

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const colours = { phases: PHASES.map((phase) => colour(phase.colour)) };
  for (const name of ["ink", "dim", "paper", "card", "rule", "soft", "old", "new", "dead", "barrier", "accent", "focus"]) colours[name] = colour(`--${name}`);
  return colours;
}

// Textures, so that nothing depends on seeing colours.
export function makeTextures(context, scale) {
  const tile = (size, draw) => {
    const canvas = new OffscreenCanvas(size * scale, size * scale);
    const inner = canvas.getContext("2d");
    inner.scale(scale, scale);
    draw(inner);
    const pattern = context.createPattern(canvas, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale));
    return pattern;
  };
  const stroke = (inner, style, width, points) => {
    inner.strokeStyle = style;
    inner.lineWidth = width;
    inner.beginPath();
    for (const [x1, y1, x2, y2] of points) {
      inner.moveTo(x1, y1);
      inner.lineTo(x2, y2);
    }
    inner.stroke();
  };
  return {
    lines: tile(6, (c) => stroke(c, "#7a520099", 1, [[-1, 7, 7, -1], [-1, 1, 1, -1], [5, 7, 7, 5]])),
    grid: tile(5, (c) => stroke(c, "#6b2a5288", 0.8, [[0, 2.5, 5, 2.5], [2.5, 0, 2.5, 5]])),
    dots: tile(5, (c) => { c.fillStyle = "#2226"; c.beginPath(); c.arc(2.5, 2.5, 1, 0, 7); c.fill(); }),
    dead: tile(7, (c) => stroke(c, "#d55e00", 1.6, [[-1, -1, 8, 8], [-1, 6, 1, 8], [6, -1, 8, 1]])),
    update: tile(4, (c) => stroke(c, "#00601e88", 0.8, [[0, 0.5, 4, 0.5]])),
  };
}
