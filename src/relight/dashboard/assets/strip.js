// The strip below a row: which shade the parameters have in each cell of a tile.

import { BACKWARD, BARRIER, FORWARD, OPTIMIZER, OUTSIDE, PARKED, STARTING } from "./phases.js";

export const [NONE, OLD, NEW, MIXED] = [0, 1, 2, 3];
const TRAINING = new Set([OUTSIDE, FORWARD, BACKWARD, BARRIER, OPTIMIZER, PARKED]);

// The shade of one run. MIXED: the history that knew the version has been forgotten.
// `base`: version up to which parameters are dark; null: every other version is.
export function shadeOf(code, step, version, base) {
  if (version < 0) return TRAINING.has(code) ? MIXED : NONE;
  if (step < 0 || code === STARTING) return NONE;
  return (base === null ? version % 2 === 0 : version <= base) ? OLD : NEW;
}

// One shade for each of `count` cells of a row's runs [first cell, phase, step, version, ...].
// Where versions change faster than cells, every other version would be noise: those cells are MIXED.
export function shadesOf(runs, count, base) {
  const shades = new Uint8Array(count);
  let before = -1; // version of the cell before
  for (let at = 0; at < runs.length; at += 4) {
    const [first, code, step, version] = runs.subarray(at, at + 4);
    const end = at + 4 < runs.length ? runs[at + 4] : count;
    const shade = shadeOf(code, step, version, base);
    const skips = base === null && before >= 0 && version > before + 1;
    shades.fill(shade, first, end);
    if (skips && shade !== NONE) {
      shades[first] = MIXED;
      if (first > 0 && shades[first - 1] !== NONE) shades[first - 1] = MIXED;
    }
    before = version;
  }
  return shades;
}
