// One rank in a window of its own: what it does, and the end of its log while it grows.

import { find, make, setText } from "./dom.js";
import { bytes, count, moment } from "./format.js";
import { getJson } from "./link.js";
import { WORDS } from "./phases.js";
import { longGpu } from "./ranks.js";

const MAX_CHARACTERS = 512 * 1024;
const EVERY_MS = 1000;

export class RankWindow {
  constructor() {
    this.dialog = find("rank");
    this.log = find("log");
    this.rank = null;
    this.life = 0;
    this.dialog.addEventListener("close", () => { this.life += 1; this.rank = null; });
    find("rank-close").addEventListener("click", () => this.dialog.close());
    find("stack-ask").addEventListener("click", () => this.askForStack(this.rank, this.life));
  }

  open(rank) {
    this.rank = rank;
    this.life += 1;
    setText(find("rank-title"), `Rank ${rank}`);
    setText(find("log-name"), `logs/rank-${rank}.log`);
    this.log.replaceChildren();
    find("stack").hidden = true;
    setText(find("stack-note"), "");
    if (!this.dialog.open) this.dialog.showModal();
    this.follow(rank, this.life);
  }

  update(ranks) {
    const line = ranks[this.rank];
    if (this.rank === null || !line) return;
    const facts = {
      process: line.process || "–", pid: line.pid ? `${line.pid}` : "–", host: line.host || "–", phase: WORDS[line.phase] ?? "–",
      "since": line.since_ns < 0 ? "–" : moment(line.since_ns, 1e7), step: count(line.step), version: count(line.version),
      "step time": line.step_ms ? `${line.step_ms} ms` : "–", memory: bytes(line.rss_bytes),
    };
    if (line.gpu) facts.GPU = longGpu(line.gpu);
    const list = find("rank-facts");
    if (list.childElementCount !== Object.keys(facts).length) list.replaceChildren(...Object.keys(facts).map((name) => make("div", {}, make("dt", { text: name }), make("dd"))));
    Object.values(facts).forEach((text, index) => setText(list.children[index].lastChild, text));
  }

  // Its main thread writes its stack, and goes on.
  async askForStack(rank, life) {
    const note = find("stack-note");
    setText(note, "asking");
    try {
      const found = await getJson(`/api/stack?rank=${rank}`);
      if (life !== this.life) return;
      setText(note, found.problem || `of ${found.process}, ${moment(found.now_ns, 1e8)}; innermost call first`);
      setText(find("stack"), found.text);
      find("stack").hidden = !found.text;
    } catch (error) {
      if (life === this.life) setText(note, error.message);
    }
  }

  async follow(rank, life) {
    let since = null;
    let heard = false;
    while (life === this.life) {
      try {
        const found = await getJson(`/api/log?rank=${rank}${since === null ? "" : `&since=${since}`}`);
        if (life !== this.life) return;
        if (since !== null && found.begin !== since) this.log.append("\n[…]\n");
        since = found.end;
        if (found.text) {
          heard = true;
          this.log.append(found.text); // a text node: whatever a script prints stays text
          while (this.log.textContent.length > MAX_CHARACTERS && this.log.firstChild) this.log.firstChild.remove();
          if (find("log-follow").checked) this.log.scrollTop = this.log.scrollHeight;
        } else if (!heard && !this.log.firstChild) {
          this.log.append(make("span", { class: "dim", text: "Nothing was printed so far." }));
        }
        if (heard && this.log.firstChild?.nodeType === Node.ELEMENT_NODE) this.log.firstChild.remove();
      } catch {
        // the link says so, and this is tried again
      }
      await new Promise((done) => setTimeout(done, EVERY_MS));
    }
  }
}
