// The timeline: ranks as rows, time to the right, drawn on one canvas. Only what is visible, and only when it changes.

import { moment, ns } from "./format.js";
import { BACKWARD, BARRIER, DONE, FORWARD, NOTHING, OPTIMIZER, OUTSIDE, PARKED, PHASES, STARTING, makeTextures, readColours } from "./phases.js";
import { MIXED, NEW, NONE, OLD, shadeOf, shadesOf } from "./strip.js";
import { CELLS, MAX_SHIFT, MIN_SHIFT, Tiles } from "./tiles.js";

const LEFT = 76;
const STEP_LANE = 18;
const CONTROLLER_LANE = 26;
const AXIS = 22;
const TOP = 4;
const ROW = { least: 2, roomy: 46, detail: 11, strip: 24 };
const MANY_RUNS = 40; // in a tile's row: more are drawn as cells
const BANDS = [
  ["struck_ns", "noticed_ns", "Failure noticed", "Notice", "#f2a07b"],
  ["noticed_ns", "stopped_ns", "Stop + Clean + Reset", "Stop", "#c9572b"],
  ["stopped_ns", "resumed_ns", "Restoration + Rollback", "Restore", "#4a90c8"],
  ["resumed_ns", "ended_ns", "Step again", "Again", "#b9d8ee"],
];

export class Timeline {
  constructor(canvas, { onRank, onHover, onView }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.onRank = onRank;
    this.onHover = onHover;
    this.onView = onView;
    this.tiles = new Tiles(() => this.wake());
    this.ranks = [];
    this.failures = [];
    this.recoveries = [];
    this.follow = true;
    this.allRanks = false;
    this.rowHeight = ROW.roomy;
    this.scroll = 0; // pixels that the rows are moved up
    this.fromNs = 0;
    this.nsPerPx = 2e10 / 1000;
    this.nowNs = 0;
    this.nowAt = 0;
    this.ended = false;
    this.scaled = false;
    this.base = null; // version up to which parameters are dark; null: every other version
    this.frames = null; // times of frames, while they are measured
    this.dirty = true;
    this.restyle();
    new ResizeObserver(() => this.resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    this.listen();
    this.resize();
    requestAnimationFrame(() => this.frame());
  }

  // --- what is known -----------------------------------------------------------------------------------------------
  update({ ranks, failures, recoveries, nowNs, knownNs, gap, ended }) {
    const first = this.ranks.length === 0;
    this.ranks = ranks;
    this.failures = failures;
    this.recoveries = recoveries;
    // The clock of the page runs on between events; it is set only where it is wrong, and never jumps for a little.
    if (Math.abs(nowNs - this.now()) > 3e8 || ended) {
      this.nowNs = nowNs;
      this.nowAt = performance.now();
    }
    this.tiles.knownNs = knownNs;
    this.tiles.gap = gap;
    this.ended = ended;
    if (!this.scaled && ranks.some((rank) => rank.step_ms > 0)) { // some two dozen steps to begin with
      this.scaled = true;
      if (this.follow) this.nsPerPx = this.boundScale((Math.min(120e3, Math.max(1500, ranks.find((rank) => rank.step_ms > 0).step_ms * 24)) * 1e6) / this.plotWidth);
    }
    if (first && ranks.length) {
      if (ended) this.showAll();
      this.fitRows();
    }
    this.wake();
  }

  reset() {
    this.tiles.clear();
    this.ranks = [];
  }

  now() {
    return this.ended ? this.nowNs : this.nowNs + (performance.now() - this.nowAt) * 1e6;
  }

  wake() {
    this.dirty = true;
  }

  // --- the view ----------------------------------------------------------------------------------------------------
  get plotWidth() {
    return Math.max(50, this.width - LEFT);
  }

  get rowsTop() {
    return TOP + STEP_LANE + CONTROLLER_LANE;
  }

  get rowsHeight() {
    return Math.max(20, this.height - this.rowsTop - AXIS);
  }

  x(at) {
    return LEFT + (at - this.fromNs) / this.nsPerPx;
  }

  timeAt(x) {
    return this.fromNs + (x - LEFT) * this.nsPerPx;
  }

  view(fromNs, toNs) {
    this.nsPerPx = this.boundScale((toNs - fromNs) / this.plotWidth);
    this.fromNs = (fromNs + toNs) / 2 - (this.nsPerPx * this.plotWidth) / 2;
    this.setFollow(false);
  }

  boundScale(scale) {
    return Math.min(2 ** MAX_SHIFT / 2, Math.max(2 ** MIN_SHIFT, scale));
  }

  zoom(factor, x = LEFT + this.plotWidth / 2) {
    if (this.follow) x = this.width;
    const at = this.timeAt(x);
    this.nsPerPx = this.boundScale(this.nsPerPx * factor);
    this.fromNs = at - (x - LEFT) * this.nsPerPx;
    this.wake();
    this.onView(this);
  }

  pan(pixels) {
    this.fromNs += pixels * this.nsPerPx;
    this.setFollow(false);
  }

  setFollow(follow) {
    this.follow = follow;
    if (follow) this.base = null;
    this.wake();
    this.onView(this);
  }

  showAll() {
    this.base = null;
    const margin = this.now() * 0.02 + 1e6;
    this.view(-margin, this.now() + margin);
  }

  // A failure, with what came before it and the recovery after it.
  showFailure(failure) {
    const recovery = this.recoveries.find((each) => each.failures.includes(failure.number));
    const end = recovery ? recovery.ended_ns : (failure.until_ns ?? failure.noticed_ns + 1e9);
    const length = Math.max(2e7, end - failure.struck_ns);
    this.base = recovery ? recovery.target_version - (recovery.decision === "forward" ? 1 : 0) : null;
    const base = this.base;
    this.view(failure.struck_ns - length * 0.8, end + length * 0.6);
    this.base = base;
    if (failure.rank >= 0) this.showRank(failure.rank);
  }

  showRank(rank) {
    const y = rank * this.rowHeight;
    if (y < this.scroll || y + this.rowHeight > this.scroll + this.rowsHeight) this.scroll = y - this.rowsHeight / 2;
    this.boundScroll();
    this.wake();
  }

  setAllRanks(all) {
    this.allRanks = all;
    this.fitRows();
    this.onView(this);
  }

  fitRows() {
    const fitting = this.rowsHeight / Math.max(1, this.ranks.length);
    this.rowHeight = this.allRanks ? Math.min(ROW.roomy, fitting) : Math.max(this.ranks.length > 64 ? 14 : this.ranks.length > 16 ? 22 : 16, Math.min(ROW.roomy, fitting));
    this.boundScroll();
    this.wake();
  }

  boundScroll() {
    this.scroll = Math.max(0, Math.min(this.scroll, this.ranks.length * this.rowHeight - this.rowsHeight));
  }

  // --- input -------------------------------------------------------------------------------------------------------
  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.offsetX, y: event.offsetY, from: this.fromNs, scroll: this.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.onHover(this.describe(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
      const dx = event.offsetX - drag.x;
      const dy = event.offsetY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < 4) return undefined;
      if (!drag.moved && Math.abs(dx) > 3) this.setFollow(false);
      drag.moved = true;
      canvas.classList.add("dragging");
      if (!this.follow) this.fromNs = drag.from - dx * this.nsPerPx;
      this.scroll = drag.scroll - dy;
      this.boundScroll();
      this.onHover(null);
      this.wake();
      this.onView(this);
      return undefined;
    });
    const drop = (event) => {
      if (drag && !drag.moved && event.type === "pointerup") this.click(drag.x, drag.y);
      drag = null;
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => this.onHover(null));
    canvas.addEventListener("wheel", (event) => {
      const unit = event.deltaMode === 1 ? 16 : 1;
      if (event.ctrlKey || event.metaKey) {
        this.zoom(Math.exp(event.deltaY * unit * 0.002), event.offsetX);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) * unit);
      } else {
        const before = this.scroll;
        this.scroll += event.deltaY * unit;
        this.boundScroll();
        if (this.scroll === before) return; // let the page scroll
        this.wake();
      }
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const keys = {
        ArrowLeft: () => this.pan(-this.plotWidth / 8),
        ArrowRight: () => this.pan(this.plotWidth / 8),
        ArrowUp: () => this.scrollRows(-3),
        ArrowDown: () => this.scrollRows(3),
        PageUp: () => this.scrollRows(-this.rowsHeight / this.rowHeight),
        PageDown: () => this.scrollRows(this.rowsHeight / this.rowHeight),
        "+": () => this.zoom(1 / 1.6), "=": () => this.zoom(1 / 1.6),
        "-": () => this.zoom(1.6),
        Home: () => this.showAll(),
        f: () => this.setFollow(!this.follow),
        a: () => this.setAllRanks(!this.allRanks),
      };
      const action = keys[event.key] ?? keys[event.key.toLowerCase()];
      if (!action) return;
      action();
      event.preventDefault();
    });
  }

  scrollRows(rows) {
    this.scroll += rows * this.rowHeight;
    this.boundScroll();
    this.wake();
  }

  rankAt(y) {
    const rank = Math.floor((y - this.rowsTop + this.scroll) / this.rowHeight);
    return y >= this.rowsTop && y < this.rowsTop + this.rowsHeight && rank >= 0 && rank < this.ranks.length ? rank : null;
  }

  click(x, y) {
    const rank = this.rankAt(y);
    if (rank !== null) this.onRank(rank);
  }

  describe(x, y) {
    const at = this.timeAt(x);
    for (const recovery of this.recoveries) {
      if (y < this.rowsTop && y > TOP + STEP_LANE && at >= recovery.struck_ns && at <= recovery.ended_ns) {
        const parts = BANDS.map(([from, to, words]) => `${words}: ${ns(recovery[to] - recovery[from])}`);
        return `Recovery ${recovery.number}: ${recovery.decision} to version ${recovery.target_version}\n${parts.join("\n")}`;
      }
    }
    const rank = this.rankAt(y);
    if (rank === null || x < LEFT) return null;
    const near = this.failures.find((f) => f.rank === rank && Math.abs(this.x(f.struck_ns) - x) < 8);
    if (near) return `Failure ${near.number}: rank ${near.rank} ${near.kind} in ${near.phase} of step ${near.step}\n${near.evidence}`;
    if (this.failures.some((f) => f.rank === rank && at >= f.struck_ns && at < this.deadUntil(f))) return `rank ${rank}: no process`;
    const kind = this.kind();
    const shift = this.shift();
    const tile = Math.floor(at / (CELLS * 2 ** shift));
    const rows = this.tiles.block(kind);
    const found = this.tiles.get(kind, shift, tile, Math.floor(rank / rows));
    if (!found) return null;
    const cell = Math.floor(at / 2 ** shift) - tile * CELLS;
    if (!found.runs) {
      const phase = PHASES[found.cells[(rank % rows) * CELLS + cell]];
      return `rank ${rank}${phase ? `: mostly ${phase.words}` : ""}\n${moment(at, this.nsPerPx)}`;
    }
    const runs = found.runs[rank % rows] ?? [];
    for (let i = runs.length - 4; i >= 0; i -= 4) {
      if (runs[i] > cell) continue;
      if (runs[i + 1] === NOTHING) return null;
      const step = runs[i + 2] >= 0 ? ` of step ${runs[i + 2]}\nversion ${runs[i + 3]}` : "";
      return `rank ${rank}: ${PHASES[runs[i + 1]]?.words ?? "?"}${step}\n${moment(at, this.nsPerPx)}`;
    }
    return null;
  }

  // --- drawing -----------------------------------------------------------------------------------------------------
  restyle() {
    this.colours = readColours();
    this.ratio = devicePixelRatio || 1;
    this.textures = makeTextures(this.context, this.ratio);
    this.palette = new Uint32Array(256);
    this.colours.phases.forEach((colour, code) => { this.palette[code] = toPixel(colour); });
    this.shades = new Uint32Array(4);
    this.shades[OLD] = toPixel(this.colours.old);
    this.shades[NEW] = toPixel(this.colours.new);
    this.shades[MIXED] = midway(this.shades[OLD], this.shades[NEW]);
    this.colours.mixed = toColour(this.shades[MIXED]);
    for (const tile of this.tiles.tiles.values()) tile.bitmap = tile.strip = null;
    this.wake();
  }

  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.width = width;
    this.height = height;
    this.ratio = devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(height * this.ratio));
    this.fitRows();
    this.draw();
  }

  frame() {
    requestAnimationFrame(() => this.frame());
    if (this.frames) this.frames.push(performance.now());
    if (this.follow) {
      const from = this.now() - this.plotWidth * this.nsPerPx;
      if (Math.abs(from - this.fromNs) > this.nsPerPx / 2) {
        this.fromNs = from;
        this.dirty = true;
        this.onView(this);
      }
    }
    if (!this.dirty) return;
    this.dirty = false;
    this.draw();
  }

  // Cells are at most as wide as a pixel of the canvas, so that bars end where they should.
  shift() {
    const perPixel = this.nsPerPx / Math.min(this.ratio, 1.5);
    return Math.max(MIN_SHIFT, Math.min(MAX_SHIFT, Math.floor(Math.log2(perPixel) + 0.2)));
  }

  kind() {
    return this.rowHeight >= ROW.detail ? "runs" : "cells";
  }

  draw() {
    const { context: c, colours } = this;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = colours.card;
    c.fillRect(0, 0, this.width, this.height);
    if (!this.ranks.length) {
      c.fillStyle = colours.dim;
      c.font = "14px system-ui, sans-serif";
      c.fillText("Waiting for the job to start.", LEFT, this.rowsTop + 24);
      return;
    }
    const marks = { steps: new Map(), barriers: new Map() };
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, this.plotWidth, this.height - AXIS + 1);
    c.clip();
    this.drawRows(marks);
    this.drawDead();
    this.drawUnknown();
    this.drawBarriers(marks.barriers);
    this.drawRestores();
    this.drawStrikes();
    this.drawController();
    this.drawSteps(marks.steps);
    c.restore();
    this.drawNames();
    this.drawAxis();
    this.tiles.request();
  }

  bar() {
    const height = this.rowHeight;
    const hasStrip = height >= ROW.strip;
    const gap = height >= ROW.detail ? Math.max(2, height * 0.14) : 0;
    const strip = hasStrip ? Math.min(7, height * 0.16) : 0;
    return { bar: height - gap - (hasStrip ? strip + 2 : 0), strip, top: gap / 2 };
  }

  visibleRows() {
    const first = Math.max(0, Math.floor(this.scroll / this.rowHeight));
    return [first, Math.min(this.ranks.length, Math.ceil((this.scroll + this.rowsHeight) / this.rowHeight))];
  }

  rowY(rank) {
    return this.rowsTop + rank * this.rowHeight - this.scroll;
  }

  drawRows(marks) {
    const { context: c } = this;
    c.save();
    c.beginPath();
    c.rect(LEFT, this.rowsTop, this.plotWidth, this.rowsHeight);
    c.clip();
    c.imageSmoothingEnabled = false;
    const kind = this.kind();
    const shift = this.shift();
    const tileNs = CELLS * 2 ** shift;
    const rows = this.tiles.block(kind);
    const [first, last] = this.visibleRows();
    const firstTile = Math.max(0, Math.floor(this.fromNs / tileNs));
    const lastTile = Math.floor(Math.min(this.timeAt(this.width), this.now()) / tileNs);
    for (let tile = firstTile; tile <= lastTile; tile++) {
      for (let block = Math.floor(first / rows); block * rows < last; block++) {
        const found = this.tiles.nearest(kind, shift, tile, block);
        if (found) this.drawTile(found, tile * tileNs, tileNs, block * rows, first, last, marks);
      }
    }
    c.restore();
  }

  drawTile([tile, firstCell, cells], startNs, tileNs, blockFirst, first, last, marks) {
    const { context: c } = this;
    const left = this.x(startNs);
    const width = tileNs / this.nsPerPx;
    const isWhole = cells === CELLS;
    if (tile.runs && isWhole && tile.most <= MANY_RUNS) {
      for (let index = Math.max(0, first - blockFirst); index < Math.min(tile.rows, last - blockFirst); index++) {
        this.drawRuns(tile.runs[index], blockFirst + index, left, width / CELLS, tile.knownNs, startNs, marks);
      }
      return;
    }
    const bitmap = this.bitmap(tile);
    if (this.rowHeight < ROW.detail) {
      c.drawImage(bitmap, firstCell, 0, cells, tile.rows, left, this.rowY(blockFirst), width, tile.rows * this.rowHeight);
      return;
    }
    const { bar, strip, top } = this.bar();
    const shades = strip && tile.runs ? this.stripBitmap(tile) : null;
    for (let index = Math.max(0, first - blockFirst); index < Math.min(tile.rows, last - blockFirst); index++) {
      const y = this.rowY(blockFirst + index) + top;
      c.drawImage(bitmap, firstCell, index, cells, 1, left, y, width, bar);
      if (shades) c.drawImage(shades, firstCell, index, cells, 1, left, y + bar + 2, width, strip);
    }
  }

  bitmap(tile) {
    tile.bitmap ??= paint(tile.rows, (pixels) => {
      for (let at = 0; at < tile.cells.length; at++) pixels[at] = this.palette[tile.cells[at]];
    });
    return tile.bitmap;
  }

  stripBitmap(tile) {
    if (!tile.strip || tile.stripBase !== this.base) {
      tile.stripBase = this.base;
      tile.strip = paint(tile.rows, (pixels) => {
        tile.runs.forEach((runs, row) => {
          shadesOf(runs, CELLS, this.base).forEach((shade, cell) => { pixels[row * CELLS + cell] = this.shades[shade]; });
        });
      });
    }
    return tile.strip;
  }

  drawRuns(runs, rank, left, cellPx, knownNs, startNs, marks) {
    const { context: c, colours, textures } = this;
    const { bar, strip, top } = this.bar();
    const y = this.rowY(rank) + top;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (let at = 0; at < runs.length; at += 4) {
      const code = runs[at + 1];
      if (code === NOTHING || code >= PHASES.length) continue;
      const x = left + runs[at] * cellPx;
      const end = left + (at + 4 < runs.length ? runs[at + 4] : CELLS) * cellPx;
      if (end < LEFT || x > this.width) continue;
      // A barrier of a millisecond is what the picture is about: it stays visible.
      const width = code === BARRIER ? Math.max(2, end - x) : end - x;
      c.fillStyle = colours.phases[code];
      c.fillRect(x, y, width + 0.4, bar);
      const texture = PHASES[code].texture;
      if (texture && width >= 4 && bar >= 8) {
        c.fillStyle = textures[texture];
        c.fillRect(x, y, width, bar);
      }
      const step = runs[at + 2];
      const goes = runs[at] === 0 && x > LEFT && startNs > 0; // on from the tile before, where its name is
      if (!goes && code !== STARTING && code !== DONE && bar >= 13 && width >= 12) this.label(code, Math.max(x, LEFT), end, y + bar / 2);
      const shade = strip ? shadeOf(code, step, runs[at + 3], this.base) : NONE;
      if (shade !== NONE) {
        c.fillStyle = shade === OLD ? colours.old : shade === NEW ? colours.new : colours.mixed;
        c.fillRect(x, y + bar + 2, width + 0.4, strip);
        if (shade === NEW) {
          c.fillStyle = textures.update;
          c.fillRect(x, y + bar + 2, width, strip);
        }
      }
      if (step >= 0 && code === FORWARD && (at > 0 || runs[at] > 0 || x >= LEFT)) {
        const seen = marks.steps.get(step);
        if (seen === undefined || x < seen) marks.steps.set(step, x);
      }
      if (step >= 0 && code === BARRIER && (runs[at + 5] === OPTIMIZER || runs[at + 5] === OUTSIDE || runs[at + 5] === FORWARD)) {
        const seen = marks.barriers.get(step);
        if (seen === undefined || end > seen) marks.barriers.set(step, Math.max(end, x + 2));
      }
    }
  }

  label(code, x, end, y) {
    const { context: c } = this;
    const room = end - x - 8;
    const { words, letter } = PHASES[code];
    const text = room > c.measureText(words).width ? words : room > 7 ? letter : "";
    if (!text) return;
    c.fillStyle = code === BARRIER ? "#fff" : code === PARKED || code === BACKWARD || code === FORWARD || code === OPTIMIZER ? "#111" : this.colours.ink;
    c.fillText(text, x + 4, y + 0.5);
  }

  deadUntil(failure) {
    return failure.until_ns ?? this.now();
  }

  drawDead() {
    const { context: c, colours, textures } = this;
    const { bar, top } = this.bar();
    for (const failure of this.failures) {
      if (failure.rank < 0 || failure.kind === "communication") continue;
      const x = Math.max(LEFT, this.x(failure.struck_ns));
      const end = Math.min(this.width, this.x(this.deadUntil(failure)));
      const y = this.rowY(failure.rank);
      if (end < LEFT || x > this.width || y + this.rowHeight < this.rowsTop || y > this.rowsTop + this.rowsHeight) continue;
      const height = Math.max(this.rowHeight >= ROW.detail ? 0 : 2, this.rowHeight - 1);
      c.fillStyle = colours.card;
      c.fillRect(x, y + top, Math.max(2, end - x), height - top);
      c.fillStyle = textures.dead;
      c.fillRect(x, y + top, Math.max(2, end - x), bar);
      c.strokeStyle = colours.dead;
      c.lineWidth = 1;
      if (bar > 6) c.strokeRect(x + 0.5, y + top + 0.5, Math.max(1, end - x - 1), bar - 1);
      if (failure.until_ns && bar >= 8 && end > LEFT && end < this.width) {
        c.fillStyle = colours.accent;
        c.beginPath();
        c.moveTo(end, y + top);
        c.lineTo(end + 8, y + top + bar / 2);
        c.lineTo(end, y + top + bar);
        c.fill();
      }
    }
  }

  // What agents have not reported yet is neither work nor idleness: it is left open. So is what is still being read.
  drawUnknown() {
    if (!this.ended) this.drawOpen(this.tiles.knownNs, this.now());
    if (this.tiles.gap) this.drawOpen(...this.tiles.gap, "older history is being read");
  }

  drawOpen(fromNs, toNs, words) {
    const { context: c, colours } = this;
    const x = Math.max(LEFT, this.x(fromNs));
    const end = Math.min(this.width, this.x(toNs));
    if (end - x < 1) return;
    const bottom = Math.min(this.rowsTop + this.rowsHeight, this.rowY(this.ranks.length));
    c.fillStyle = colours.soft;
    c.globalAlpha = 0.55;
    c.fillRect(x, this.rowsTop, end - x, bottom - this.rowsTop);
    c.globalAlpha = 1;
    c.font = "12px system-ui, sans-serif";
    if (!words || c.measureText(words).width + 16 > end - x) return;
    c.fillStyle = colours.dim;
    c.textBaseline = "middle";
    c.fillText(words, x + 8, this.rowsTop + 14);
  }

  drawBarriers(barriers) {
    const { context: c, colours } = this;
    const shown = [...barriers.values()].sort((a, b) => a - b);
    if (shown.length > 1 && (shown[shown.length - 1] - shown[0]) / (shown.length - 1) < 40) return;
    const bottom = Math.min(this.rowsTop + this.rowsHeight, this.rowY(this.ranks.length));
    c.strokeStyle = colours.barrier;
    c.lineWidth = 1.4;
    c.setLineDash([5, 3]);
    c.beginPath();
    for (const x of shown) {
      c.moveTo(x, this.rowsTop - 3);
      c.lineTo(x, bottom);
    }
    c.stroke();
    c.setLineDash([]);
  }

  drawRestores() {
    const { context: c, colours } = this;
    const { bar, top } = this.bar();
    if (this.rowHeight < ROW.strip) return;
    c.strokeStyle = c.fillStyle = colours.accent;
    c.lineWidth = 1.6;
    for (const recovery of this.recoveries) {
      const from = this.x(recovery.stopped_ns);
      const to = this.x(recovery.resumed_ns);
      if (to < LEFT || from > this.width || to - from < 12) continue;
      for (const target of recovery.replaced) {
        const source = recovery.sources.reduce((best, each) => (best === null || Math.abs(each - target) < Math.abs(best - target) ? each : best), null);
        if (source === null) continue;
        const down = target > source;
        const y1 = this.rowY(source) + top + (down ? bar : 0);
        const y2 = this.rowY(target) + top + (down ? 0 : bar);
        const tip = down ? -6 : 6;
        const middle = (from + to) / 2;
        c.beginPath();
        c.moveTo(from, y1);
        c.bezierCurveTo(middle, y1, middle, y2 + tip, to, y2 + tip);
        c.stroke();
        c.beginPath();
        c.moveTo(to - 5, y2 + tip);
        c.lineTo(to + 5, y2 + tip);
        c.lineTo(to, y2);
        c.fill();
      }
    }
  }

  drawStrikes() {
    const { context: c } = this;
    const { bar, top } = this.bar();
    for (const failure of this.failures) {
      const x = this.x(failure.struck_ns);
      if (x < LEFT - 8 || x > this.width + 8) continue;
      const y = failure.rank >= 0 ? this.rowY(failure.rank) + top + bar / 2 : TOP + STEP_LANE + CONTROLLER_LANE / 2;
      if (failure.rank >= 0 && (y < this.rowsTop - 6 || y > this.rowsTop + this.rowsHeight + 6)) continue;
      const scale = Math.max(0.55, Math.min(1, bar / 24));
      c.beginPath();
      for (const [dx, dy] of [[2, -14], [-6, 2], [-1, 2], [-3, 14], [6, -3], [1, -3]]) c.lineTo(x + dx * scale, y + dy * scale);
      c.closePath();
      c.fillStyle = "#ffd400";
      c.strokeStyle = "#b03000";
      c.lineWidth = 1.2;
      c.fill();
      c.stroke();
    }
  }

  drawController() {
    const { context: c } = this;
    const y = TOP + STEP_LANE;
    const height = CONTROLLER_LANE - 6;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const recovery of this.recoveries) {
      if (this.x(recovery.ended_ns) < LEFT || this.x(recovery.struck_ns) > this.width) continue;
      for (const [from, to, name, short, colour] of BANDS) {
        const left = this.x(recovery[from]);
        const right = Math.max(left + 1, this.x(recovery[to]));
        if (recovery[to] <= recovery[from]) continue;
        const tip = Math.min(7, right - left);
        c.fillStyle = colour;
        c.beginPath();
        for (const [px, py] of [[left, y], [right - tip, y], [right, y + height / 2], [right - tip, y + height], [left, y + height]]) c.lineTo(px, py);
        c.closePath();
        c.fill();
        const again = from === "resumed_ns" && !recovery.steps_repeated;
        const words = again ? "Next step" : name;
        const told = `${words}: ${ns(recovery[to] - recovery[from])}`;
        const start = Math.max(left, LEFT);
        const fits = [told, words, again ? "Next" : short].find((text) => c.measureText(text).width + 14 < right - start);
        if (!fits) continue;
        c.fillStyle = "#111";
        c.fillText(fits, start + 5, y + height / 2 + 0.5);
      }
    }
  }

  drawSteps(steps) {
    const { context: c, colours } = this;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.fillStyle = colours.dim;
    let free = LEFT;
    for (const [step, at] of [...steps].sort((a, b) => a[1] - b[1])) {
      const text = `step ${step}`;
      const x = Math.max(at, LEFT + 2);
      const width = c.measureText(text).width;
      if (x < free || x + width > this.width) continue;
      c.fillText(text, x, TOP + STEP_LANE / 2);
      free = x + width + 10;
    }
  }

  drawNames() {
    const { context: c, colours } = this;
    const [first, last] = this.visibleRows();
    const every = Math.max(1, Math.ceil(13 / this.rowHeight));
    const { bar, top } = this.bar();
    c.textBaseline = "middle";
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = colours.dim;
    c.fillText("controller", 8, TOP + STEP_LANE + CONTROLLER_LANE / 2 - 3);
    c.save();
    c.beginPath();
    c.rect(0, this.rowsTop - 6, this.width, this.rowsHeight + 6); // the first name may be taller than its row
    c.clip();
    c.fillStyle = colours.ink;
    c.font = "600 11.5px system-ui, sans-serif";
    for (let rank = Math.ceil(first / every) * every; rank < last; rank += every) {
      c.fillText(`rank ${rank}`, 8, this.rowY(rank) + top + Math.max(bar, 8) / 2);
    }
    if (this.rowHeight >= ROW.strip) {
      c.fillStyle = colours.rule;
      for (let rank = first; rank < last; rank++) c.fillRect(0, this.rowY(rank) + this.rowHeight - 1, this.width, 1);
    }
    c.restore();
    const total = this.ranks.length * this.rowHeight;
    if (total > this.rowsHeight + 1) {
      c.fillStyle = colours.dim;
      const height = Math.max(16, (this.rowsHeight * this.rowsHeight) / total);
      c.globalAlpha = 0.5;
      c.fillRect(this.width - 5, this.rowsTop + (this.scroll / (total - this.rowsHeight)) * (this.rowsHeight - height), 4, height);
      c.globalAlpha = 1;
    }
  }

  drawAxis() {
    const { context: c, colours } = this;
    const y = this.height - AXIS;
    c.fillStyle = colours.rule;
    c.fillRect(LEFT, y, this.plotWidth, 1);
    c.fillRect(LEFT, TOP, 1, y - TOP);
    c.fillStyle = colours.dim;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    const step = tick(this.nsPerPx * 96);
    for (let at = Math.ceil(this.fromNs / step) * step; at <= this.timeAt(this.width); at += step) {
      const x = this.x(at);
      if (x < LEFT || at < 0) continue;
      c.fillRect(x, y, 1, 5);
      const text = moment(at, step);
      if (x + c.measureText(text).width + 4 < this.width) c.fillText(text, x + 3, y + 13);
    }
  }
}

// A round number of ns, at least `least`: powers of ten times 1, 2 or 5 below a second, then what clocks show.
function tick(least) {
  for (let unit = 1; unit < 1e9; unit *= 10) for (const times of [1, 2, 5]) if (unit * times >= least) return unit * times;
  for (const wide of [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400]) if (wide * 1e9 >= least) return wide * 1e9;
  return Math.ceil(least / 864e11) * 864e11;
}

// A canvas with one pixel for each cell of a tile's rows.
function paint(rows, fill) {
  const canvas = new OffscreenCanvas(CELLS, Math.max(1, rows));
  const context = canvas.getContext("2d");
  const image = context.createImageData(CELLS, Math.max(1, rows));
  fill(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
  return canvas;
}

function toPixel(colour) {
  const value = parseInt(colour.slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

function midway(one, other) {
  let pixel = 0;
  for (const bits of [0, 8, 16, 24]) pixel |= (((one >>> bits & 255) + (other >>> bits & 255)) >> 1) << bits;
  return pixel >>> 0;
}

function toColour(pixel) {
  return `rgb(${pixel & 255}, ${pixel >>> 8 & 255}, ${pixel >>> 16 & 255})`;
}
