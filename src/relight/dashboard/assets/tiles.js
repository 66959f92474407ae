// Tiles of the timeline: 256 cells of 2^shift ns for a block of ranks. Fetched when seen, kept within bounds.

import { getBytes } from "./link.js";
import { NOTHING } from "./phases.js";

export const CELLS = 256;
export const MIN_SHIFT = 10;
export const MAX_SHIFT = 42;
const KEPT_BYTES = 96 * 2 ** 20;
const AT_ONCE = 4;
const AGAIN_MS = 900; // the newest tile is asked for again: agents report once a second
const BLOCK = { runs: 32, cells: 128 };

export class Tiles {
  constructor(onTile) {
    this.onTile = onTile;
    this.tiles = new Map(); // in order of use, oldest first
    this.bytes = 0;
    this.wanted = [];
    this.asked = new Set();
    this.knownNs = 0;
    this.worldSize = 0;
    this.life = 0;
    this.gap = null; // from when to when it is not known yet what ranks did: the server is still reading it
  }

  clear() {
    this.tiles.clear();
    this.bytes = 0;
    this.life += 1; // answers on their way are of another job
  }

  block(kind) {
    return BLOCK[kind];
  }

  // The tile if it is here; asked for if not, or if it was not whole when it came.
  get(kind, shift, tile, block) {
    const key = `${kind} ${shift} ${tile} ${block}`;
    const found = this.tiles.get(key);
    if (found) {
      this.tiles.delete(key);
      this.tiles.set(key, found);
    }
    const startNs = tile * CELLS * 2 ** shift;
    const endNs = startNs + CELLS * 2 ** shift;
    const isOld = found && performance.now() - found.at > AGAIN_MS;
    const isFilling = found?.gap && (!this.gap || (isOld && startNs < found.gap[1] && endNs > found.gap[0]));
    const stale = !found || isFilling || (isOld && found.knownNs < endNs && this.knownNs > found.knownNs);
    if (stale && startNs <= this.knownNs && !this.asked.has(key)) this.wanted.push({ key, kind, shift, tile, block });
    return found;
  }

  // The tile, or a part of a coarser one that shows the same time meanwhile: [tile, first cell, cells].
  nearest(kind, shift, tile, block) {
    const exact = this.get(kind, shift, tile, block);
    if (exact) return [exact, 0, CELLS];
    for (let up = 1; up <= 6; up++) {
      const key = `${kind} ${shift + up} ${Math.floor(tile / 2 ** up)} ${block}`;
      const found = this.tiles.get(key);
      if (found) {
        const cells = CELLS / 2 ** up;
        return [found, (tile % 2 ** up) * cells, cells];
      }
    }
    return null;
  }

  // Ask for what was wanted since the last call, as far as there is room; the rest is wanted again if still seen.
  request() {
    for (const want of this.wanted) {
      if (this.asked.size >= AT_ONCE) break;
      if (!this.asked.has(want.key)) this.fetch(want);
    }
    this.wanted = [];
  }

  async fetch({ key, kind, shift, tile, block }) {
    const rows = BLOCK[kind];
    const life = this.life;
    const { knownNs, gap } = this;
    this.asked.add(key);
    try {
      const query = `shift=${shift}&tile=${tile}&first=${block * rows}&rows=${rows}&runs=${kind === "runs" ? 1 : 0}`;
      const data = await getBytes(`/api/tiles?${query}`);
      if (life !== this.life) return;
      const made = kind === "runs" ? decodeRuns(data) : { cells: new Uint8Array(data), rows: data.byteLength / CELLS };
      this.keep(key, { ...made, knownNs, gap, at: performance.now(), bytes: data.byteLength * 3 + 1000 });
    } catch {
      await new Promise((done) => setTimeout(done, 300)); // the link says so
    } finally {
      this.asked.delete(key);
      this.onTile();
    }
  }

  keep(key, tile) {
    this.bytes += tile.bytes - (this.tiles.get(key)?.bytes ?? 0);
    this.tiles.delete(key);
    this.tiles.set(key, tile);
    for (const [oldest, { bytes }] of this.tiles) {
      if (this.bytes <= KEPT_BYTES) break;
      this.tiles.delete(oldest);
      this.bytes -= bytes;
    }
  }
}

// Each row is its runs [first cell, phase, step, version, ...]; also as cells, to be drawn when there are many.
function decodeRuns(data) {
  const words = new Int32Array(data);
  const runs = [];
  let most = 0;
  for (let at = 0; at < words.length; ) {
    const length = words[at];
    runs.push(words.subarray(at + 1, at + 1 + length));
    most = Math.max(most, length / 4);
    at += 1 + length;
  }
  const cells = new Uint8Array(runs.length * CELLS).fill(NOTHING);
  runs.forEach((row, index) => {
    for (let at = 0; at < row.length; at += 4) {
      const end = at + 4 < row.length ? row[at + 4] : CELLS;
      cells.fill(row[at + 1], index * CELLS + row[at], index * CELLS + end);
    }
  });
  return { runs, most, cells, rows: runs.length };
}
