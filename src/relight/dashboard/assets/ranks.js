// The grid of devices: any number of ranks, of which only the visible ones are in the document.

import { bytes, count } from "./format.js";
import { make, setText } from "./dom.js";
import { WORDS } from "./phases.js";

const HEIGHT = 26;
const COLUMNS = [["rank", ""], ["host", ""], ["phase", ""], ["step", "right"], ["version", "right"], ["step time", "right"], ["memory", "right"], ["GPU", "right gpu"]]; // the last one only if there are GPUs

export class Ranks {
  constructor(element, onRank) {
    this.element = element;
    this.onRank = onRank;
    this.all = [];
    this.shown = [];
    this.onlyOdd = false;
    this.current = 0;
    this.lines = [];
    this.head = make("div", { class: "row head", role: "row", "aria-rowindex": "1" });
    for (const [name, kind] of COLUMNS) this.head.append(make("span", { role: "columnheader", class: kind, text: name }));
    this.space = make("div", { role: "presentation" });
    element.append(this.head, this.space);
    element.addEventListener("scroll", () => this.render());
    new ResizeObserver(() => this.render()).observe(element);
    element.addEventListener("keydown", (event) => this.key(event));
  }

  update(ranks) {
    this.all = ranks;
    this.element.classList.toggle("with-gpu", ranks.some((rank) => rank.gpu));
    const newest = ranks.reduce((most, rank) => Math.max(most, rank.version), 0);
    this.shown = this.onlyOdd ? ranks.filter((rank) => rank.phase === "DEAD" || rank.phase === "PARKED" || rank.version < newest - 1) : ranks;
    this.render();
  }

  filter(onlyOdd) {
    this.onlyOdd = onlyOdd;
    this.update(this.all);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / HEIGHT) - 2);
    const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" || event.key === " ") {
      if (this.shown[this.current]) this.onRank(this.shown[this.current].rank);
    } else if (event.key in moves) {
      this.current = Math.max(0, Math.min(this.shown.length - 1, this.current + moves[event.key]));
      const top = this.current * HEIGHT;
      if (top < this.element.scrollTop) this.element.scrollTop = top;
      const least = top + 2 * HEIGHT - this.element.clientHeight;
      if (least > this.element.scrollTop) this.element.scrollTop = least;
      this.render();
    } else {
      return;
    }
    event.preventDefault();
  }

  render() {
    const total = this.shown.length;
    this.space.style.height = `${total * HEIGHT}px`;
    this.element.setAttribute("aria-rowcount", String(total + 1));
    const first = Math.max(0, Math.floor(this.element.scrollTop / HEIGHT) - 2);
    const wanted = Math.min(total - first, Math.ceil(this.element.clientHeight / HEIGHT) + 4);
    while (this.lines.length < wanted) this.lines.push(this.makeLine());
    this.lines.forEach((line, index) => {
      line.element.hidden = index >= wanted;
      if (index < wanted) this.fill(line, first + index);
    });
  }

  makeLine() {
    const cells = COLUMNS.map(([, kind]) => make("span", { role: "gridcell", class: kind }));
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    const words = make("span");
    cells[2].className = "phase";
    cells[2].append(swatch, words);
    const element = make("div", { class: "row line", role: "row" }, ...cells);
    const line = { element, cells, swatch, words, index: 0 };
    element.addEventListener("click", () => {
      this.current = line.index;
      this.onRank(this.shown[line.index].rank);
    });
    this.element.append(element);
    return line;
  }

  fill(line, index) {
    const rank = this.shown[index];
    line.index = index;
    line.element.style.top = `${(index + 1) * HEIGHT}px`;
    line.element.classList.toggle("current", index === this.current);
    line.element.setAttribute("aria-rowindex", String(index + 2));
    line.element.setAttribute("aria-selected", String(index === this.current));
    const texts = { 0: `${rank.rank}`, 1: rank.host || "–", 3: rank.step < 0 ? "–" : count(rank.step), 4: rank.version < 0 ? "–" : count(rank.version) };
    texts[5] = rank.step_ms ? `${rank.step_ms < 100 ? rank.step_ms.toFixed(1) : count(Math.round(rank.step_ms))} ms` : "–";
    texts[6] = bytes(rank.rss_bytes);
    texts[7] = rank.gpu ? shortGpu(rank.gpu) : "";
    line.cells[7].classList.toggle("trouble", Boolean(rank.gpu?.trouble));
    for (const [cell, text] of Object.entries(texts)) setText(line.cells[cell], text);
    line.swatch.className = `swatch ${rank.phase || "UNKNOWN"}`;
    setText(line.words, WORDS[rank.phase] ?? "not heard of");
  }
}

const known = (value, words) => (value === null || value === undefined ? [] : [words]);

function shortGpu(gpu) {
  const said = [...known(gpu.busy_share, `${Math.round(gpu.busy_share * 100)} %`), ...known(gpu.celsius, `${gpu.celsius} °C`), ...known(gpu.used_bytes, bytes(gpu.used_bytes).replace(/\.\d/, ""))];
  return (gpu.trouble ? "⚠ " : "") + (said.join(" · ") || gpu.name);
}

// All that is known of a device.
export function longGpu(gpu) {
  const said = [
    `${gpu.index}: ${gpu.name || "GPU"}`, ...known(gpu.busy_share, `${Math.round(gpu.busy_share * 100)} % busy`), ...known(gpu.celsius, `${gpu.celsius} °C`),
    ...known(gpu.used_bytes, `${bytes(gpu.used_bytes)}${gpu.total_bytes ? ` of ${bytes(gpu.total_bytes)}` : ""}`), ...known(gpu.watts, `${Math.round(gpu.watts)} W`),
  ];
  return said.join(", ") + (gpu.trouble ? ` ⚠ ${gpu.trouble}` : "");
}
