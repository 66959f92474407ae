"""Recovery of relight, torchrun and torchft side by side: one kill at a time, the systems taking turns.

Taking turns matters on a shared machine: whatever slows it down for a minute slows all systems, so that ratios mean
something where seconds do not. The rest of the report says where relight's time went, and how far that is from the
time of merely copying the state.

Run by ``python -m benchmarks.recovery.run --rounds 5``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    measure_apart,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import markdown_table, mebibytes, milliseconds
from benchmarks.recovery.peers import (
    WORLD_SIZE,
    JobFailed,
    Trial,
    describe,
    table,
    torchft_trial,
    torchrun_trial,
)
from benchmarks.recovery.relight import PARTS, PATH, RelightTrial, relight_trial
from benchmarks.recovery.torchrun_checkpoint import CHECKPOINT_EVERY_STEPS

FIGURES = {
    "computing_again_s": "every rank computes again",
    "replacement_contributes_s": "replacement contributes",
    "next_new_step_s": "end of the next new step",
}
# What is compared with what, and the ratio to reach: relight's figure, the peer, the peer's figure.
TARGETS = (
    ("computing_again_s", "torchrun", "computing_again_s", 1 / 20),
    ("computing_again_s", "torchft", "replacement_contributes_s", 1 / 10),
    ("next_new_step_s", "torchrun", "next_new_step_s", 1 / 8),
    ("next_new_step_s", "torchft", "next_new_step_s", 1 / 5),
)
Measure = Callable[[int, int, Path], Trial | RelightTrial]
SYSTEMS: dict[str, Measure] = {
    "relight": relight_trial,
    "torchrun": torchrun_trial,
    "torchft": partial(torchft_trial, "default"),
    "torchft-strict": partial(torchft_trial, "strict"),
    "relight, no standby": partial(relight_trial, standbys=0),
}


def run(rounds: int, seed: int, workdir: Path, systems: Sequence[str]) -> Document:
    """Measure, and put everything into one document."""
    document = start_document(
        "recovery",
        rounds=rounds,
        seed=seed,
        world_size=WORLD_SIZE,
        standbys=1,
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
        fault="SIGKILL of a random rank at a random moment of a random step",
    )
    trials: list[Trial] = []
    own: list[RelightTrial] = []
    not_started: list[str] = []
    progress = Progress(rounds * len(systems))
    for number in range(rounds):
        for system in systems:
            try:
                measured = SYSTEMS[system](number, seed, workdir)
            except JobFailed as error:
                not_started.append(f"{system}, round {number}: {error}")
                progress.skipped(not_started[-1])
                continue
            if isinstance(measured, RelightTrial):
                own.append(measured)
                measured = measured.trial
            trials.append(measured)
            progress.done(describe(measured))
    document["not_started"] = not_started
    document["trials"] = [dataclasses.asdict(trial) for trial in trials]
    document["relight"] = [
        {"system": one.trial.system} | {k: v for k, v in dataclasses.asdict(one).items() if k != "trial"} for one in own
    ]
    document["table"] = table(trials)
    document["copy"] = copy_speed(statistics.median([one.moved_bytes for one in own if one.moved_bytes] or [0]))
    document["ratios"] = ratios(trials)
    document["headline"] = headline(trials)
    add_verdicts(document, verdicts(document))
    return document


def headline(trials: Sequence[Trial]) -> str:
    """The result in a sentence."""
    medians = {system: _median(trials, system, "computing_again_s") for system in SYSTEMS}
    named = ", ".join(f"{system} {value:.3g} s" for system, value in medians.items() if value is not None)
    return f"From the kill of a process until every rank computes again: {named}."


def copy_speed(size: float) -> dict[str, float] | None:
    """The time that merely copying so many bytes takes here; None if no trial moved any."""
    if not size:
        return None
    figures: dict[str, float] = measure_apart("copy_speed", "--bytes", str(int(size)))
    return figures


def ratios(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """relight's median over a peer's, for each pair of figures that is compared."""
    pairs = {(own, peer, theirs): target for own, peer, theirs, target in TARGETS}
    for peer in ("torchrun", "torchft", "torchft-strict"):
        pairs |= {(f, peer, f): pairs.get((f, peer, f), 0.0) for f in FIGURES}
    found = []
    for (own, peer, theirs), target in pairs.items():
        ours, other = _median(trials, "relight", own), _median(trials, peer, theirs)
        ratio = ours / other if ours is not None and other else None
        found.append({"own": own, "peer": peer, "theirs": theirs, "target": target or None, "ratio": ratio})
    return found


def _median(trials: Sequence[Trial], system: str, figure: str) -> float | None:
    values = [getattr(trial, figure) for trial in trials if trial.system == system]
    return statistics.median(values) if values and None not in values else None


def verdicts(document: Document) -> list[Verdict]:
    """The targets for recovery times."""
    return [
        Verdict(_compared(row), row["ratio"], row["target"], "ratio", _spread_note(document, row))
        for row in document["ratios"]
        if row["target"]
    ]


def _compared(row: dict[str, Any]) -> str:
    theirs = "" if row["own"] == row["theirs"] else f" until its {FIGURES[row['theirs']]}"
    return f"kill until {FIGURES[row['own']]}, as a share of {row['peer']}{theirs}"


def _spread_note(document: Document, row: dict[str, Any]) -> str:
    """Both medians in seconds."""
    medians = []
    for system, figure in (("relight", row["own"]), (row["peer"], row["theirs"])):
        values = [trial[figure] for trial in document["trials"] if trial["system"] == system and trial[figure]]
        medians.append(f"{statistics.median(values):.3g} s" if values else "never")
    return " of ".join(medians)


# ---------------------------------------------------------------- text


def render(document: Document) -> str:
    """Markdown."""
    settings = document["settings"]
    parts = [
        f"{settings['world_size']} workers, about 20 M parameters with AdamW, {settings['fault']}; torchrun with a "
        f"checkpoint every {settings['checkpoint_every_steps']} steps. {settings['rounds']} rounds, the systems taking "
        "turns. Medians, and [least, greatest]; seconds from the kill.",
        document["table"],
        markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        "All ratios of medians, like with like:",
        _ratio_table(document["ratios"]),
    ]
    own = [one for one in document["relight"] if one["system"] == "relight" and one["path_s"]]
    if own and document["copy"]:
        parts += _stages(own, document["copy"])
    fresh = [one for one in document["relight"] if one["system"] != "relight" and one["path_s"]]
    if fresh:
        totals = [sum(one["path_s"].values()) for one in fresh]
        replace = statistics.median(one["path_s"]["replace"] for one in fresh)
        parts.append(
            f"Without a standby a fresh process takes the rank: {statistics.median(totals):.2f} s, of which "
            f"{replace:.2f} s until that process has imported torch, built the model and warmed up."
        )
    parts += [f"Not started: {text.splitlines()[0]}" for text in document["not_started"]]
    return "\n\n".join(parts)


def _ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    same = [row for row in rows if row["own"] == row["theirs"]]
    peers = list(dict.fromkeys(row["peer"] for row in same))
    lines = []
    for figure, name in FIGURES.items():
        found = {row["peer"]: row["ratio"] for row in same if row["own"] == figure}
        lines.append([name, *(f"1/{1 / found[p]:.1f}" if found.get(p) else "–" for p in peers)])
    return markdown_table(["relight takes, of the time of", *peers], lines)


def _stages(own: Sequence[dict[str, Any]], copy: dict[str, float]) -> list[str]:
    """Say where the time went, and the limit: bytes over copy speed."""
    limit_s = copy["flat_copy_s"]
    total_s = statistics.median(sum(one["path_s"].values()) for one in own)
    rows = []
    for name, what in PATH.items():
        rows.append(_stage_row(name, what, [one["path_s"][name] for one in own], limit_s))
        if name == "restore":
            rows += [
                _stage_row(f"– {part}", PART_WORDS[part], [one["parts_s"][part] for one in own], limit_s)
                for part in PARTS
            ]
    rows.append(["**total**", "kill until every rank computes", milliseconds(total_s), "", f"{total_s / limit_s:.1f}"])
    redo_s = statistics.median(one["reported_s"]["redo_seconds"] for one in own)
    decisions = ", ".join(sorted({one["decision"] for one in own}))
    return [
        "## Where relight's time goes",
        f"The limit is the copy: {mebibytes(copy['bytes'])} moved, which one thread copies in memory in "
        f"{milliseconds(limit_s)} ({copy['bytes'] / limit_s / 2**30:.1f} GiB/s) and a Unix socket carries from process "
        f"to process in {milliseconds(copy['unix_socket_s'])} ({copy['bytes'] / copy['unix_socket_s'] / 2**30:.1f} "
        "GiB/s), measured in the same run on the machine when it was quiet. The stages follow one another and add up; "
        "the parts of the restore are those of the slowest rank and run side by side on two cores.",
        markdown_table(["stage", "", "median", "[least, greatest]", "times the limit"], rows),
        f"The redo of the step then takes {redo_s:.2f} s. Decisions: {decisions}. Kills with a warm standby: "
        f"{sum(one['standby_ready'] for one in own)} of {len(own)}.",
    ]


PART_WORDS = {
    "finish": "a prepared survivor completes its step",
    "reform": "wait for the new process group",
    "copy": "state of a survivor to the replacement, verified",
    "digest": "digest of the state, all ranks",
    "rollback": "data position, random streams, buffers",
}


def _stage_row(name: str, what: str, values: Sequence[float], limit_s: float) -> list[str]:
    middle = statistics.median(values)
    extremes = f"[{milliseconds(min(values))}, {milliseconds(max(values))}]"
    return [name, what, milliseconds(middle), extremes, f"{middle / limit_s:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery of relight beside torchrun and torchft")
    parser.add_argument("--rounds", type=int, default=5, help="kills of each system")
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0, help="of the faults, the parameters and the data")
    parser.add_argument("--output", type=Path, default=RESULTS / "recovery.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.rounds, options.seed, Path(workdir), options.systems)
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
