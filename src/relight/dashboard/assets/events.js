// What happened: failures, recoveries with the seconds of each stage, spares, stragglers, what is survived, notices.

import { bytes, count, moment, seconds } from "./format.js";
import { make } from "./dom.js";

const STAGES = [
  ["detect", "notice"], ["stop", "stop"], ["replace", "replace"], ["decide", "decide"], ["finish", "finish the step"],
  ["reform", "new group"], ["copy", "copy"], ["digest", "verify"], ["rollback", "roll back"], ["resume", "resume"], ["redo", "step again"],
];

function table(names, rows) {
  const head = make("tr", {}, ...names.map(([name, kind]) => make("th", { class: kind ?? "", scope: "col", text: name })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function pick(row, act, label) {
  row.className = `${row.className} pick`;
  row.tabIndex = 0;
  row.setAttribute("aria-label", label);
  row.addEventListener("click", act);
  row.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    act();
    event.preventDefault();
  });
  return row;
}

const cell = (text, kind = "") => make("td", { class: kind, text });
const empty = (text) => make("p", { class: "empty", text });

function stackButton(failure, onStack) {
  if (!failure.has_stack) return [];
  const act = (event) => { onStack(failure); event.stopPropagation(); };
  return [" ", make("button", { type: "button", class: "small", text: "Python stack", onclick: act, onkeydown: (event) => event.stopPropagation() })];
}

export function showFailures(element, failures, total, onShow, onStack) {
  if (!failures.length) return element.replaceChildren(empty("No failure so far."));
  const rows = [...failures].reverse().map((f) => pick(make("tr", {},
    cell(`${f.number}`, "n"), cell(moment(f.struck_ns, 1e8), "n"), cell(f.rank < 0 ? "–" : `${f.rank}`, "n"), cell(f.kind),
    cell(f.step < 0 ? "–" : `${f.phase} of ${count(f.step)}`), cell((f.estimated ? "about " : "") + seconds(f.detect_seconds), "n"), make("td", { class: "evidence" }, f.evidence, ...stackButton(f, onStack)),
  ), () => onShow(f), `Failure ${f.number}: show it in the timeline`));
  const names = [["#", "n"], ["at", "n"], ["rank", "n"], ["kind"], ["in step"], ["noticed in", "n"], ["evidence"]];
  element.replaceChildren(table(names, rows), ...older(total - failures.length));
  return undefined;
}

function older(hidden) {
  return hidden > 0 ? [make("p", { class: "empty", text: `${count(hidden)} older ones are in report.json.` })] : [];
}

export function showRecoveries(element, recoveries, total, onShow) {
  if (!recoveries.length) return element.replaceChildren(empty("No recovery so far."));
  const median = (name) => {
    const values = recoveries.map((r) => r.stages[name]).filter((v) => v !== null).sort((a, b) => a - b);
    return values.length ? values[Math.floor((values.length - 1) / 2)] : 0;
  };
  const middle = Object.fromEntries(STAGES.map(([name]) => [name, median(name)]));
  const used = STAGES.filter(([name]) => recoveries.some((r) => r.stages[name] > 0.0005));
  const rows = [...recoveries].reverse().map((r) => {
    const bar = make("div", { class: "stages", role: "img", "aria-label": STAGES.map(([name, words]) => `${words} ${seconds(r.stages[name])}`).join(", ") });
    for (const [name, words] of STAGES) {
      const value = r.stages[name] ?? 0;
      if (value <= 0) continue;
      const part = make("i", { class: `s-${name}`, title: `${words}: ${seconds(value)} (median ${seconds(middle[name])})` });
      part.style.flexGrow = String(value);
      bar.append(part);
    }
    const what = `${r.decision} to ${count(r.target_version)}${r.steps_repeated ? ", step again" : ""}${r.restarts ? `, restarted ${r.restarts}×` : ""}`;
    return pick(make("tr", {}, cell(`${r.number}`, "n"), cell(moment(r.struck_ns, 1e8), "n"), cell(r.replaced.join(", ") || "–"), make("td", { class: "nowrap", title: r.reason, text: what }),
      cell(seconds(r.stages.total), "n"), make("td", { class: "evidence" }, bar), ...used.map(([name]) => cell(seconds(r.stages[name]), "n"))),
    () => onShow(r), `Recovery ${r.number}: show it in the timeline`);
  });
  const names = [["#", "n"], ["at", "n"], ["replaced"], ["decision"], ["total", "n"], ["shares of the stages"], ...used.map(([, words]) => [words, "n"])];
  const foot = make("tr", {}, make("td", { colspan: "4", class: "dim", text: `median of ${recoveries.length}` }), cell(seconds(median("total")), "n"), cell(""), ...used.map(([name]) => cell(seconds(middle[name]), "n dim")));
  const made = table(names, rows);
  made.append(make("tfoot", {}, foot));
  element.replaceChildren(made, ...older(total - recoveries.length));
  return undefined;
}

export function showSpares(element, summary) {
  const facts = make("dl", { class: "facts" });
  const add = (name, text) => facts.append(make("dt", { class: "dim", text: name }), make("dd", { text }));
  add("standbys ready", `${summary.standbys_ready} of ${summary.standbys_asked}${summary.standbys_starting ? `, ${summary.standbys_starting} starting` : ""}`);
  for (const shard of summary.shards) {
    add(`copies of ${shard.name}`, `${shard.copies}: ${shard.may_fail} more may fail at once${shard.may_fail ? "" : " – the next failure ends the job"}`);
  }
  add("state moved", bytes(summary.moved_bytes));
  add("controller restarts", `${summary.controller_restarts}`);
  element.replaceChildren(facts);
}

// The newest version of each engine, and the update under way.
export function showEngines(element, publishing) {
  if (!publishing) return element.replaceChildren(empty("This job publishes no weights. (training.publish(every=...) does.)"));
  const p = publishing;
  const facts = make("dl", { class: "facts" });
  const add = (name, ...what) => facts.append(make("dt", { class: "dim", text: name }), make("dd", {}, ...what));
  if (p.gone) add("publisher", `${p.gone} is gone; what follows is what it said last. Rank 0's successor goes on with the next version.`);
  if (p.version < 0) add("published", p.engines.length ? "nothing so far" : "nothing so far: no engine is connected");
  else if (p.total_bytes) {
    const bar = make("progress", { max: String(p.total_bytes), value: String(p.moved_bytes), "aria-label": `version ${p.version}` });
    add(`version ${count(p.version)}`, bar, ` ${share(p.moved_bytes, p.total_bytes, p.seconds)}`);
  } else add(`version ${count(p.version)}`, p.error || `done in ${seconds(p.seconds)}`);
  if (p.updates) add("in all", `${count(p.updates)} ${p.updates === 1 ? "version" : "versions"}, ${bytes(p.updates_bytes)}${p.updates_seconds > 0 ? `, ${bytes(p.updates_bytes / p.updates_seconds)}/s while one moved` : ""}`);
  const behind = (e) => (e.version < 0 ? "–" : e.behind ? `${count(e.behind)} ${e.behind === 1 ? "step" : "steps"} behind` : "newest");
  const rows = p.engines.map((e) => make("tr", {}, cell(e.name), cell(`${e.pid}`, "n"), cell(e.version < 0 ? "none yet" : count(e.version), "n"), cell(behind(e), "n")));
  const lost = p.dropped.map((d) => make("tr", { class: "warning" }, cell(d.name), make("td", { colspan: "3", class: "evidence", text: `did not get version ${count(p.version)}: ${d.why}` })));
  element.replaceChildren(facts, ...(rows.length || lost.length ? [table([["engine"], ["pid", "n"], ["answers with version", "n"], ["", "n"]], [...rows, ...lost])] : []));
  return undefined;
}

// "1.2 GiB of 4.0 GiB, 820 MiB/s, about 3 s left"
export function share(done, total, spent) {
  const rate = spent > 0 ? done / spent : 0;
  const left = rate > 0 && done < total ? `, about ${seconds((total - done) / rate)} left` : "";
  return `${bytes(done)} of ${bytes(total)}${rate > 0 ? `, ${bytes(rate)}/s` : ""}${left}`;
}

export function showStragglers(element, stragglers, onRank) {
  if (!stragglers.length) return element.replaceChildren(empty("No rank's forward takes much longer than the others'. (In backward everyone waits for the slowest, so forward is what is compared.)"));
  const rows = stragglers.map((s) => pick(make("tr", {}, cell(`${s.rank}`, "n"), cell(seconds(s.forward_seconds), "n"), cell(seconds(s.median_seconds), "n"), cell(`${(s.forward_seconds / s.median_seconds).toFixed(2)}×`, "n")), () => onRank(s.rank), `Rank ${s.rank}: show its log`));
  element.replaceChildren(table([["rank", "n"], ["forward takes", "n"], ["median", "n"], ["", "n"]], rows));
  return undefined;
}

export function showCoverage(element, coverage) {
  if (!coverage) return element.replaceChildren(empty("Every rank holds all of the state: any one that is left is enough. (Or training has not begun yet.)"));
  const used = new Map(coverage.tiers.map((r) => [r.tier, r.in_use]));
  const last = used.get("checkpoint") ? "from a checkpoint" : "the job ends";
  const losses = coverage.losses.map((l) => make("tr", {}, cell(l.what), cell(count(l.cases), "n"), cell(count(l.replicas), "n"), cell(count(l.buddies), "n"), cell(count(l.rest), "n"), cell(l.examples.join("; "), "evidence")));
  const tiers = coverage.tiers.map((r) => make("tr", {}, cell(r.tier), cell(r.in_use ? "yes" : "no"), cell(r.in_use ? count(r.steps_lost) : "–", "n"), cell(bytes(r.copied_bytes), "n"), cell(seconds(r.copy_seconds), "n"), cell(r.host_bytes ? `${bytes(r.host_bytes)} of each rank's host` : `${count(r.devices)} devices for one more`)));
  element.replaceChildren(
    table([["losing"], ["cases", "n"], ["from replicas", "n"], ["from buddy memory", "n"], [last, "n"], ["not from replicas, for example"]], losses),
    table([["tier"], ["in use"], ["steps lost, at most", "n"], ["copied for each lost rank", "n"], ["at 1 GiB/s", "n"], ["costs"]], tiers),
  );
  return undefined;
}

export function showNotices(element, notices) {
  if (!notices.length) return element.replaceChildren(empty("Nothing was said so far."));
  const rows = [...notices].reverse().map((n) => make("tr", { class: n.level }, cell(moment(n.seconds * 1e9, 1e8), "n"), cell(n.level), cell(n.text, "evidence")));
  element.replaceChildren(table([["at", "n"], ["level"], ["text"]], rows));
  return undefined;
}
