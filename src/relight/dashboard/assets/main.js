// Brings the parts of the page together: the link's events go in, views are drawn.

import { find, make, setText } from "./dom.js";
import { share, showCoverage, showEngines, showFailures, showNotices, showRecoveries, showSpares, showStragglers } from "./events.js";
import { count, moment, ns, percent, seconds } from "./format.js";
import { getJson, listen } from "./link.js";
import { LEGEND } from "./phases.js";
import { RankWindow } from "./rank.js";
import { Ranks } from "./ranks.js";
import { Timeline } from "./timeline.js";

const job = { summary: null, failures: [], recoveries: [], notices: [], stragglers: [], publishing: null, restores: [], coverage: null, ranks: [] };
const tip = find("tip");
const rankWindow = new RankWindow();
const openRank = (rank) => { rankWindow.open(rank); rankWindow.update(job.ranks); };
const ranks = new Ranks(find("ranks"), openRank);
const timeline = new Timeline(find("timeline"), {
  onRank: openRank,
  onHover: (text, x, y) => {
    tip.hidden = !text;
    if (!text) return;
    setText(tip, text);
    const canvas = find("timeline");
    tip.style.left = `${Math.min(canvas.offsetLeft + x + 14, canvas.offsetLeft + canvas.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${canvas.offsetTop + y + 14}px`;
  },
  onView: (view) => {
    find("follow").setAttribute("aria-pressed", String(view.follow));
    find("all-ranks").setAttribute("aria-pressed", String(view.allRanks));
    const length = view.nsPerPx * view.plotWidth;
    setText(find("span"), view.follow ? `last ${ns(length)}` : `${moment(Math.max(0, view.fromNs), length / 100)}, ${ns(length)}`);
  },
});
window.relightTimeline = timeline; // for measuring, from the console too

async function openEvidence(failure) {
  setText(find("evidence-title"), `Failure ${failure.number}: ${failure.rank < 0 ? "the job" : `rank ${failure.rank}`}, ${failure.kind} in step ${failure.step}`);
  setText(find("evidence-text"), failure.evidence);
  setText(find("evidence-stack"), "");
  find("evidence").showModal();
  try {
    setText(find("evidence-stack"), (await getJson(`/api/failure?number=${failure.number}`)).stack);
  } catch (error) {
    setText(find("evidence-stack"), error.message);
  }
}
find("evidence-close").addEventListener("click", () => find("evidence").close());

// --- what the server says -------------------------------------------------------------------------------------------
let told = 0;

function take(event) {
  if (event.whole) {
    timeline.reset();
    job.ranks = [];
    told = -1; // failures of before this page was opened are not announced
  }
  for (const topic of ["summary", "failures", "recoveries", "notices", "stragglers", "publishing", "restores", "coverage"]) {
    if (topic in event) job[topic] = event[topic];
  }
  for (const line of event.ranks) job.ranks[line.rank] = line;
  job.ranks.length = job.ranks.findLastIndex((line) => line !== undefined) + 1;
  const ended = Boolean(job.summary?.ended || job.summary?.silent_seconds); // its clock stands still
  timeline.update({ ranks: job.ranks, failures: job.failures, recoveries: job.recoveries, nowNs: event.now_ns, knownNs: event.known_ns, gap: job.summary?.gap_ns ?? null, ended });
  if ("summary" in event) showSummary(job.summary);
  showWaiting();
  if (event.ranks.length) ranks.update(job.ranks);
  rankWindow.update(job.ranks);
  if ("failures" in event) announce();
  show(event);
}

const TOPICS = { spares: "summary", engines: "publishing" }; // of pages that are not called as theirs

function show(event) {
  const total = job.summary ?? {};
  const pages = {
    failures: () => showFailures(find("failures"), job.failures, total.failures ?? 0, (f) => timeline.showFailure(f), openEvidence),
    recoveries: () => showRecoveries(find("recoveries"), job.recoveries, total.recoveries ?? 0, (r) => {
      const failure = job.failures.find((f) => r.failures.includes(f.number));
      if (failure) timeline.showFailure(failure);
    }),
    spares: () => { if (total.job) showSpares(find("spares"), total); },
    engines: () => showEngines(find("engines"), job.publishing),
    stragglers: () => showStragglers(find("stragglers"), job.stragglers, openRank),
    coverage: () => showCoverage(find("coverage"), job.coverage),
    notices: () => showNotices(find("notices"), job.notices),
  };
  for (const [page, render] of Object.entries(pages)) {
    if ((TOPICS[page] ?? page) in event) render();
  }
}

function announce() {
  const newest = job.failures[job.failures.length - 1];
  const number = newest?.number ?? 0;
  if (told >= 0 && number > told) setText(find("announce"), `Failure ${number}: rank ${newest.rank} ${newest.kind} in ${newest.phase} of step ${newest.step}`);
  told = number;
}

// What the job waits for, if it does not train: said below the head of the page.
function showWaiting() {
  const { summary } = job;
  const said = [];
  if (summary?.silent_seconds) said.push(`No sign of life from the job's controller for ${seconds(summary.silent_seconds)}: it was killed with relight run, or its host or the file system is gone. What you see is what was known last.`);
  else if (summary?.waiting) said.push(`${summary.stage}: ${summary.waiting}.`);
  for (const r of job.restores) said.push(`Rank ${r.rank} copies the state: ${share(r.copied_bytes, r.total_bytes, r.seconds)}.`);
  find("waiting").hidden = !said.length;
  find("waiting").classList.toggle("bad", Boolean(summary?.silent_seconds));
  setText(find("waiting"), said.join(" "));
}

function showSummary(summary) {
  const { problem } = summary;
  const failed = summary.error ? `The job ended: ${summary.error}` : "";
  const doubts = summary.doubts ? `The bits may differ from those of an undisturbed run: ${summary.doubts}` : "";
  find("problem").hidden = !(problem || failed || doubts);
  setText(find("problem"), problem || failed || doubts);
  setText(find("job"), summary.job || "relight");
  document.title = summary.job ? `${summary.job} – relight` : "relight";
  if (!summary.job) return;
  const stage = summary.silent_seconds ? "silent" : summary.stage;
  setText(find("stage"), stage);
  find("stage").dataset.stage = stage;
  setText(find("script"), `${summary.script}, ${summary.world_size} ranks, generation ${summary.generation}`);
  setText(find("ranks-count"), `${count(summary.world_size)}`);
  const may = Math.min(...summary.shards.map((shard) => shard.may_fail));
  const figures = [
    ["step", count(summary.version), summary.until ? `of ${count(summary.until)}` : ""],
    ["steps per second", summary.steps_per_second ? summary.steps_per_second.toFixed(summary.steps_per_second < 10 ? 2 : 1) : "–", ""],
    ["running for", seconds(summary.seconds), ""],
    ["goodput", percent(summary.goodput), ""],
    ["time lost", seconds(summary.time_lost_seconds), ""],
    ["failures", count(summary.failures), summary.recoveries ? `${count(summary.recoveries)} recovered` : ""],
    ["steps repeated", count(summary.steps_repeated), ""],
    ["bits as undisturbed", summary.bits || "–", "", summary.bits === "not known"],
    ["standbys ready", `${summary.standbys_ready}`, `of ${summary.standbys_asked}`],
    ["more may fail at once", summary.stage === "ended" ? "–" : count(may), "", summary.stage !== "ended" && summary.stage !== "starting" && may === 0],
  ];
  const element = find("figures");
  if (!element.childElementCount) {
    for (const [name] of figures) element.append(make("dl", { class: "figure" }, make("dt", { text: name }), make("dd", {}, make("span"), " ", make("small"))));
  }
  figures.forEach(([, value, note, alert], index) => {
    const figure = element.children[index];
    figure.classList.toggle("alert", Boolean(alert));
    setText(figure.lastChild.firstChild, value);
    setText(figure.lastChild.lastChild, note);
  });
}

// --- the page itself ------------------------------------------------------------------------------------------------
for (const [kind, words] of [...LEGEND, ["DEAD", "no process"], ["OLD", "parameters"], ["NEW", "updated"]]) {
  find("legend").append(make("li", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), words));
}
const buttons = {
  follow: () => timeline.setFollow(!timeline.follow),
  "zoom-in": () => timeline.zoom(1 / 1.6),
  "zoom-out": () => timeline.zoom(1.6),
  earlier: () => timeline.pan(-timeline.plotWidth / 3),
  later: () => timeline.pan(timeline.plotWidth / 3),
  fit: () => timeline.showAll(),
  "all-ranks": () => timeline.setAllRanks(!timeline.allRanks),
};
for (const [id, action] of Object.entries(buttons)) find(id).addEventListener("click", action);
find("ranks-filter").addEventListener("change", (event) => ranks.filter(event.target.value === "odd"));

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    find(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
}
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = tabs[(index + move + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
});

listen(take, (state, why) => {
  const link = find("link");
  link.dataset.link = state;
  const ended = job.summary?.ended;
  setText(link, state === "live" ? (ended ? "the job has ended" : "live") : `${why}; trying again`);
});
