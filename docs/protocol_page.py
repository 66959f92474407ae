"""Writes PROTOCOL.md: the text below, with tables generated from the code. With --check, says whether it is current.

    python docs/protocol_page.py [--check]

- stages, events and orders: by `controller_table.py`, from the syntax trees of `core/controller.py` and `core/stages`;
- decisions: `core/recovery/decision.py` is run over all that three ranks can report;
- the worker's table: by `worker_table.py`, from `core/worker`;
- invariants, planted bugs: `sim/judge/invariants.py`, `sim/planted/mutations.py`, tests/sim/regressions.
"""

import inspect
import itertools
import re
import string
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import controller_table
import worker_table
from made_page import write_or_check

from relight.core.controller import Stage
from relight.core.protocol import events
from relight.core.recovery.decision import Decision, Halt, decide
from relight.sim.judge.invariants import INVARIANTS
from relight.sim.planted.mutations import MUTATIONS, Mutation
from relight.sim.search.golden import read_golden

PAGE = Path(__file__).with_name("PROTOCOL.md")
REGRESSIONS = PAGE.parents[1] / "tests" / "sim" / "regressions"
BASE = 1  # the step that the decision table is about

TEXT = """\
<!-- Written by docs/protocol_page.py; change the text there, and run it. -->
# The recovery protocol

After this page you can predict the decision of every recovery, and know the invariants on which bit-identity rests.

Terms are those of the [glossary](GLOSSARY.md). The rule is `decide` in `src/relight/core/recovery/decision.py`; the
[simulator](SIMULATOR.md) drives it, and the controller around it, through random schedules and through every order of
events of small jobs. The tables of this page are generated from the code.

## A step

```
   FORWARD          BACKWARD        | BARRIER |      OPTIMIZER            (next) FORWARD
   parameters at version i          |         |  i -> i+1                 parameters at version i+1
```

A rank is **prepared(i)** when it can reach version i+1 without any other rank, and can also still go back to version
i: every gradient of step i is reduced on it *and it knows so*, and its rank-private state for version i+1 is kept
beside its page. Only then does it enter the BARRIER, an all-reduce of a few integers. Passing it proves that every
rank is prepared. Each rank finishes the write after it alone, and is never interrupted there.

## Buffers that change for the first time

Buffers that steps change (statistics of BatchNorm) are rank-private: they are in no copy of the state and in no digest
of it, and kept beside the page. Which they are is learnt from the steps, and all ranks must say the same, or sources
would describe one version in different ways, and digests of one version would differ. But some buffers change by
chance, on one rank before another (BatchNorm in blocks that stochastic depth skips). So ranks agree before any of them
is prepared:

```
   some rank has changed one    | all-reduce: not all are prepared | all-reduce: which | BARRIER |
```

1. A rank that has found a buffer of which the others may not know is **not prepared**, keeps no private state for
   version i+1, and says so in the barrier's all-reduce. All others are prepared, and enter it as always.
2. If any rank has said so, no rank has passed the barrier. Those that were prepared **withdraw** that: first what is
   beside the page for version i+1, then they enter the next all-reduce.
3. In that one ranks add up which buffers they have, and take on those of all. Then each is prepared, and comes to the
   barrier.

A failure before that barrier goes back to version i, by the rule below: a rank that had something to say is unprepared,
or is dead and has left nothing for version i+1 (a rank that goes back withdraws what an undone attempt has kept for
it); and once the second all-reduce has completed anywhere, every rank has withdrawn, so that one which died since,
before it was prepared anew, has left nothing either. Undoing the step also undoes what it has shown of buffers. So at
every version all ranks know the same ones. It costs two small all-reduces more in the few steps in which a buffer
changes for the first time.

A buffer counts if an operation was seen to write it, or another one of its module. If it only has other bits than
before, memory may be corrupted, and the next comparison of the states tells. Stages of a pipeline have different
modules, and do not agree on any. A buffer that changes for the first time after a barrier which stood before the last
write is a *surprise* (below): ranks agree on it in the next step.

## Steps with several writes

A step may have any number of writes (`optimizer.step()` of one optimizer after another), with collectives between
them. It then has one of two forms, the same on all ranks. W is a write, C a collective:

```
   barrier before the last write    ... C  W  C | BARRIER | W  commit    learnt: nothing else comes after it
   barrier at the end               ... C  W  C  W  | BARRIER | commit   nothing needs to be known
```

- Before a write that comes *before* the barrier, a **pre-image** of what it changes is taken. A rank that goes back
  to version i restores its pre-images, after the decision and before it serves its state to another rank. They are
  kept until the step is committed or undone, however often Stop comes in between, and dropped with the commit.
- With the barrier **before the last write**, a prepared rank holds version i with the earlier writes of the step, and
  the last gradient. Forward: it makes the last write. Back: it restores the pre-images. A step with one write has
  none.
- With the barrier **at the end**, a prepared rank holds all bits of version i+1, and the pre-images of version i.
  Forward: it commits, and writes nothing again. Back: it restores them. The private state that it has kept is that of
  the end of the step, so private state may change after the last write.
- Inside a write before the barrier a rank may be interrupted: it is not prepared, and the write is undone. It is not
  torn, so its phase is not OPTIMIZER there.
- A replacement is blank, and later at the target version, but never prepared before it has done the step itself.

The form of a step is learnt, and agreed on in barriers. While nothing is known yet, and in the first step after a
recovery, the barrier stands at the end; also until every optimizer that the script passed has made a step, since the
first step of one (a discriminator that starts late) would be a surprise. The form changes no bit. Ranks must agree on
it all the same: if more comes after the barrier than the last write, ranks of different form would bring different
collectives; and where states are compared before the barrier, they would compare different moments of the step.

The rule of learning (`core/worker/pattern.py`) is made for scripts whose steps are not all alike: lazy regularization
writes twice in some steps and four times in others, a critic is trained more often than its generator, a loss is
averaged after the write in every hundredth step.

- Two steps in a row that were alike on all ranks are enough for a step of one write. If any step had several writes,
  it takes 64: one of them may come more often in a later step. Ranks tell each other of this, too.
- Once steps have **differed** in the place of their last need of other ranks, nothing is learnt any more: for the rest
  of the job every write has a pre-image, and the barrier stands at the end. It is no difference if only the first
  steps do something (set a value once), nor if a step has no write, or other writes where nothing more needs other
  ranks. What moves torch's `AveragedModel` is no write in this sense, so it may come in any step and anywhere in it:
  before the barrier it gets a pre-image, and after it, it is finished as all else.
- A rank keeps this through recoveries, and adds it to its number in each barrier, that of the step which differs
  included, so all ranks, and every replacement, know of it with the next barrier that they pass.

So a script can surprise once, at the first step that differs, and never after it.

### A surprise

A write, a collective or a change of private state comes, contrary to what was learnt, after a barrier that stood
before the last known write. Tensors written since the barrier have no pre-image, and the rest of the step needs the
other ranks:

1. A rank that is interrupted between the surprise and the commit is **torn**. A rank that was prepared at the
   barrier, and is ordered to finish the step by itself, cannot, and is torn as well.
2. Each rank commits alone, and keeps its private state for version i+1 anew before it shows that version on its page.
3. A rank that fails before that leaves the private state of the barrier, and its replacement starts version i+1 with
   it. A second barrier could prove that every rank has kept its state anew, but ranks need not all come to one, since
   the change may depend on a rank's data. So the bits are *doubted*: every rank that has committed the surprise, or is
   torn in it, reports `BitsDoubted` when a recovery (or a last checkpoint) goes on from version i+1, and the job's
   report says that its bits are not known to be those of an undisturbed run. Once the next barrier is passed, every
   rank has kept its state anew, and nothing is doubted.

If the script of one rank alone would have surprised, and this rank fails before it does, no survivor can know.

Torn ranks copy from a rank that has committed the step, or from one that has not written yet, if there is one; the
decision rule finds it without knowing of surprises. If none is left, the job goes to the fallback tiers, or ends and
says so. A torn rank has its own private state beside its page, and shows this by reporting *torn* and not *blank*,
also after it has begun to copy.

A surprise is a difference forever, also to a rank that was interrupted in it. If a collective of all ranks was part of
it, every rank that commits the step knows of it, so all of them put the barrier at the end from the next step on.
Otherwise (a collective of some ranks, private state) the others hear of it at the next barrier, which may still stand
before a write, and the step after that is the first with its barrier at the end.

## Why not decide from the failed rank

An all-reduce is not atomic: when a rank dies inside it, it can complete on some survivors and fail on others. A rule
that looks at the failed rank's phase, or at tags read before everyone has stopped, then lets ranks continue with
different parameters, or waits forever. Only a weaker statement always holds: *if any rank passed the barrier of step
i, every survivor is prepared(i)*. The rule rests on that alone.

## A collective between two steps

Code after the block runs once, and a recovery cannot repeat it. Survivors run it to its end before they report or
restore, so that a replacement gets what it leaves. Code between two epochs a replacement may run itself, in two cases;
in all others, ranks go on alone after a collective that the recovery cuts.

**All meet in it.** In code between two epochs a rank may *wait* in a collective: its script stands there, the status
says so, with the number of the collective since the step, and the recovery runs inside the call. It may as long as that
code has changed no tensor that replicas share, and reads nothing that the steps have set and no rank keeps, and if what
each earlier collective gave is the same on every rank, and is kept. If every intact rank of the target version waits in
a collective, or is to finish the step first, Restore says that targets *run the code*, and that all meet in the one of
the highest number: a replacement begins after the block of the last step, with its rank's private state of the barrier,
and runs the code itself. Earlier collectives give it what they gave the others, without calling these. After Resume
those that wait call the same collective again, on the new groups, and the replacement comes to it. Nothing is repeated
and nothing doubted. What is served to the replacement is the state with which the code began, and what its collectives
have given since.

1. Ranks may wait in collectives of different numbers: a broadcast is over on its source first, and an all-reduce may
   complete on some ranks and break on others. Restore names those that are *given* results, in the collective in which
   they wait and in later ones, as a replacement is. They get these from a rank that waits in the one of the highest
   number, before they form the new groups; if that fails, they hold no more than before. Only such ranks are sources.
2. Several collectives may be under way. A rank waits in the first that is not over, and calls all of them again.
3. A rank that is to finish its step comes to the collective after the decision, and carries the order out there; or
   where it asks for its next step, if that code calls none. Where all are to finish, none waits yet: each says with its
   status whether the step is the last one of an epoch, after which *comes* code that a replacement can run. If that
   code then turns out to change a tensor first, the rank's restore fails, and the recovery begins again.
4. If not all can meet (one that is lost had asked for its next step, or one that has completed more than another does
   not know what a collective gave), the recovery begins again, and that Stop tells all to go on alone. So does a Stop
   before a last checkpoint, and each that comes after such a Resume before every rank has committed a step: that code
   may fail in a replacement, and is tried once.

**All have run it.** A rank may also be lost in that code after its last collective, or where it has none (rank 0 alone
evaluates and saves); the others are in the next step then. Each says with its status how many collectives that code
has called, if it *gives* the results of all, and if no tensor that replicas share has changed since the code began. If
all say the same number, and no lost rank had asked for the next step, Restore says that targets run the code, and names
no collective. Ranks that still wait in one of it, and those that are to finish the step first, are given what they
lack. A replacement is given all results, and then takes the next step with the others, who go back to the beginning of
it. If a rank that is given results calls another collective than they did, it fails, and the recovery begins again.

**Ranks go on alone** otherwise, each with its own value; it doubts the bits, and says so with its status (or with
Restored, if it finishes the step only after the decision). A rank that has come to its next step has completed every
collective before it, so what it holds is right.

1. Copies come from ranks that did not go alone; if there are none, from one rank of each part, the lowest that has
   copied nothing in this recovery.
2. If the states agree in the end, as after code that only prints the value, each rank keeps its own.
3. If they differ, and some rank went alone, the recovery begins again, and all others copy from the ranks of rule 1.
   A rank that is to copy keeps its private state first, as that code has left it. From then on it is torn until the
   copy is complete. If the rank that it follows is lost meanwhile, its own state is gone as well.

The bits stay doubted also where all follow a rank that had completed the collective: variables of the script, which
each rank keeps for itself, may hold the value of the cut one.

## Variables that code changes after the barrier

What a rank had kept at its barrier lacks what code changes after it, in the rest of the block or between two steps. If
the rank is lost there, its replacement takes the present values of its source where both had kept equal ones at the
barrier. The bits are doubted all the same: these values are right only if that code does the same on all ranks.

## The start

The ranks start once all *nodes* of the job have joined, on these and in their order, whatever else has joined by then.
A *spare* says so when it joins, and again after each restart of its agent; it holds no rank before one is lost.
Standbys are started with the ranks. If spares are expected and some have not joined yet, the standbys wait for them, at
most until every rank has reached its first step. Until then the loss of a host with ranks ends the job, and that of a
spare costs its standbys. Later, nodes and spares are alike.

In its first step each rank shows the others, by digests, what the script had made before its loop. No rank computes
before all have seen that: another all-reduce follows the comparison. So a rank that is lost in code of its first step
has been seen by every survivor, any of which can tell its replacement the values of its rank. In that all-reduce each
rank also says whether code between epochs needs what steps set after their last write. If one does, the barrier of the
last step of each epoch stands at the end of its block, on all ranks.

## A host that is drained

Once each rank of the host has a warm standby elsewhere, **WindDown** goes to all ranks: in the barrier of the next step
they agree to pause after it. When all have reported that version, the ranks of the host are ended, and a recovery
begins in which every survivor holds the same version, so it goes back to that version and repeats nothing. The order
holds in its generation alone; a failure on the way is an ordinary recovery, after which it is given again. The host
is given back (**ReleaseHost**) when no process of it lives, so no recovery waits for an end that no agent can report.

## Hosts that are ordered

A job may have a *supplier*, which orders hosts of the cluster. The controller compares numbers after every event, from
Begin to the last step. Wanted are the nodes and so many spares, or, without that number, as many hosts as were here at
once, ordered ones not counted.

1. For each host that is missing, and not on order, **OrderHost** asks for one, under a name that was never used in
   this job. Its agent joins as a spare under that name. So an order that is given again, by the successor of a
   controller, brings one host: the second agent of a name is refused.
2. An order is over when it is refused, when its host has not joined in time, when the host is not needed (a lost one
   came back), when the host was lost or given back, and with the job. **CancelHost** says so to the supplier, but for
   orders that were refused; an order that may have been placed, by a command that did not end, is cancelled.
   Meanwhile **HostWaits** says why its host has not come, for people: nothing is decided by that.
3. A host that joins under the name of an order that is over is sent away (**ReleaseHost**): the cluster may take it
   back at any moment. A host that comes after the job ended hears that it has.
4. After a refusal, an order of which no host came, or a host whose machine is to be avoided, the next order waits 10 s,
   then 20 s, 40 s, ... at most 600 s, until a host of use has come. The supplier's own words are in the notice and in
   the report.
5. A machine that was lost twice, or has reported a fault, is named in each order as one to exclude. A host on such a
   machine that comes all the same helps out, and is not counted as here: another one is ordered beside it.
6. An ordered host that is too many, and has held no rank for long, is drained. Those to be avoided are too many once
   enough others are here, and all but one on the same machine always are.
7. Nothing waits for an order, and nothing that the supplier does or fails to do ends a job. Ranks are placed on the
   hosts that are here.

## After a failure

1. The controller journals a new generation and sends **Stop**. Collectives of the old generation fail at once. A
   worker acknowledges only outside a write.
2. It **collects** {step, version, lineage, prepared, torn, blank} from every member, and waits until the failed
   process is known dead, or fenced with its host.
3. It **decides** over the members that are neither blank nor torn. With `base` the smallest version among them:
   forward to `base + 1` if every one of them is at `base + 1`, or prepared(`base`), and the dead ranks' private state
   for `base + 1` is there; otherwise back to `base`. (If a dead rank has no private state for `base + 1`, it never
   entered the barrier, so no rank passed it; or it withdrew it after a surprise, and no rank finished the step. If it
   kept none for `base` either, its page was lost with its host, which proves nothing: the job halts.) A member at
   `base + 1` beside one that is unprepared is impossible; the job halts and says so. Of ranks whose page is gone with
   their host, or with all of its processes: if the private state of every intact member follows from rank and step
   alone, so does theirs, for any version; if not, the job halts ([decision
   4](decisions/0004-private-state-beside-the-page.md)). Where the state is divided over ranks
   (`core/recovery/shards.py`) the rule is the same: it asks every intact survivor, of whatever part, so there is one
   target for all. Each part must
   have an intact holder; if one has none, the job goes down ([below](#below-replicas)), or halts and names it.
4. **Restore**: prepared members finish the step locally, or go back, as was decided. Copies go only into blank or
   torn ranks, are verified piece by piece, and do not count until the last digest matched. Of a divided state, only
   from holders of the same part. A rank that is to go on from its own state, and is blank, torn or at another version,
   reports that its restore failed.
5. **Rollback** restores the tensors that the step had written, from their pre-images, buffers that forward changed,
   objects that may have changed, random streams, the batch in hand (kept; drawn again if the script changed it in
   place), and DDP's reducer, whose bucket layout must not depend on who failed when.
6. Every member reports version, **lineage** (a hash chain over committed steps), layout and state digest. If they
   agree (in their state: the ranks that hold the same part), **Resume**; if not, the job halts.

The controller's own death: its successor replays the journal. A recovery in progress begins again from 1; the
successor never continues an old decision, since it does not know which processes received it. Otherwise the orders
that hold (Begin or Resume of the current generation, Release, Kill, Spawn) are given again.

A failure at any point of this opens the next generation, from 1. Generation numbers are never reused; keys, orders
and reports of an older generation are ignored. Every wait ends: by an answer, by a newer Stop, or by a deadline after
which the awaited process counts as failed too.

## Which steps repeat

| failed in | decision | steps repeated |
|---|---|---|
| FORWARD, BACKWARD, before the barrier | back to i, with pre-images of what was written | the step in flight |
| all survivors prepared, barrier not passed | forward if the dead rank had kept its private state, else back | 0 or 1 |
| BARRIER, OPTIMIZER, commit | forward to i+1 | 0 (or the next step, if survivors had started it) |
| after a surprise | by the ranks that are not torn; if there is none, below replicas | 0, 1, or more below replicas |

No version that any rank had finished is ever undone while each part of the state has an intact holder.

## Below replicas

If some part has no intact holder, or no process holds some rank's private state, the controller checks whether a
fallback tier has all of it (`core/recovery/fallback.py`): snapshots in host memory, of which each rank reports those
that it holds complete, its own and its ward's. The newest version of which every rank's snapshot is in some memory is
the target, *all* ranks go back to it, and the Restore says from which tier, how many versions are undone, and why. If
there is none, the newest checkpoint that every rank can see. That is the exception to I7; the judge of journals demands
that there was no intact holder and no newer version.

The job goes down in the same way if replicas of one version hold different bits, and no majority shows which is
right. A bit may have changed at any time since they were last seen to agree: in a comparison before a barrier, in the
handshake of a recovery, or at the start. Each rank reports that version (`agreed`), and the job returns only to
versions up to the newest of these, never to the one that differed. The Restore names the version from which on no
state is trusted (`distrust`): rank 0 removes checkpoints of such versions before it reports.

From this order on, newer versions count for nothing: if the recovery begins again, ranks that have gone back stay
there, and the others are blank. Snapshots of newer versions are dropped; the snapshot of the target is only read.
Snapshots fit together because all ranks make them of the same versions: at multiples of K, and at the first boundary
after a recovery. A version is *established* when the barrier's all-reduce has counted every rank that has both its
own snapshot and its ward's; only then may older ones be overwritten. A recovery keeps the newest version that is
complete by the ranks' reports, so a rank that had not heard of it yet does not overwrite it.

## What ends a job

The same exception twice at the same step (a bug: its traceback is shown once), unless code after an undone attempt
raised it, the same hang twice, too many of the script's own failures at one step, no intact replica left, ranks that
contradict each other. Each says why. Deaths from outside and restores that break never end a job while an intact
replica lives: after three in a row without a step in between, the next start, or the next Restore, waits 1 s, then 2,
4, ... at most 60 s (`core/membership/backoff.py`; a limit: `--max-failed-attempts`). The pause is a deadline like any
other, so a journal repeats it.

If checkpoints are kept, and each part of the state may still be held, a last one comes first (stage *saving*):
**Stop**, reports and the decision as above, over the members that hold state; no rank is replaced and nothing is
copied. Prepared ranks finish the step. Then **Save** names a holder of each part, which writes it. Every rank writes
its own private state, and that of lost ranks comes from their agents, through the store of the generation. The first
holder waits for all, and completes the checkpoint. A process whose script raised an exception outside a write holds
whole state too: it stays until it is killed, and counts if it was the last failure. A failure before the order is
given is one holder less; one after it, or ten minutes, end the job without a checkpoint. If the controller dies in
this stage, its successor begins it again, in a new generation; files that are whole already, or the whole checkpoint,
stay as they are. Where ranks contradict each other nothing is saved.

## Stages of the controller

The meaning of the deadline differs by stage.

${stages}

## Events and orders

The controller's table: for each event the stages in which it matters, the orders that may follow, and the stages that
the job may go to. In other stages the event is only noted, or ignored. [Messages](MESSAGES.md) explains each name. An
agent that joins again also gets the newest order to all ranks once more.

${events}

## The worker's table

A worker is a value as well (`core/worker`), and its table is complete: an event in a state that is not listed is a bug
of the driver that handed it in. Actions are carried out in order, by threads around a real script
(`training/worker`) or in virtual time (`sim/model`). Its states:

${worker_states}

For each event the states in which it is decided in the same way, the actions that may follow, and the states that the
worker may be in after it. *recover* stands for what follows `StepLeft`: to carry out the decision in hand, or to report
and wait for one.

${worker_events}

## The decision table

Three ranks, step ${base}, version ${base} at its start: all ${cases} combinations of the possible reports of a rank,
and of the remains of the private state of one that reports nothing. They fall into ${rows} groups, each with one
decision. *Unprepared* is at version ${base} and has not come to the barrier of the step, which it may have begun or
not; *prepared* has; *ahead* is at version ${after}. Ranks without any remaining private state, whose state can be
derived, are not counted among the lost ones.

${decisions}

## What must hold

${invariants}

## Planted bugs

Each bug breaks the protocol in one place. The simulator must find it: soon by random schedules, and again by a
recorded schedule (`tests/sim/regressions`), in which it breaks the named invariant first.

${planted}
"""


# --- stages, events, orders ---------------------------------------------------------------------------------------
def _event_rows() -> Iterator[tuple[str, str, str, str, str]]:
    for name, *outcome in controller_table.event_rows():
        kind = getattr(events, name.strip("*"), None)
        yield name, "" if kind is None else _first_sentence(kind), outcome[0], outcome[1], outcome[2]


def _stage_rows() -> Iterator[tuple[str, str, str]]:
    source = inspect.getsource(Stage)
    comments = {line.split("=")[0].strip(): line.partition("# ")[2] for line in source.splitlines() if " = " in line}
    handlers = controller_table.deadlines()
    for stage in Stage:
        yield stage.value, comments[stage.name], handlers[stage].removeprefix("on_").replace("_", " ") or "none"


def _first_sentence(kind: type) -> str:
    text = " ".join((kind.__doc__ or "").split())
    return "" if text.startswith(kind.__name__ + "(") else text.split(". ")[0].split(": ")[0].rstrip(".")


# --- the decision table -------------------------------------------------------------------------------------------
REPORTS = {
    "unprepared": {"step": BASE, "version": BASE, "prepared": -1},
    "unprepared, step not begun": {"step": BASE - 1, "version": BASE, "prepared": -1},
    "prepared": {"step": BASE, "version": BASE, "prepared": BASE},
    "ahead": {"step": BASE, "version": BASE + 1, "prepared": -1},
    "torn": {"step": BASE, "version": BASE, "prepared": -1, "torn": True},
}
LEFT = {
    "has both": (BASE, BASE + 1),
    f"lacks version {BASE + 1}": (BASE,),
    f"lacks version {BASE}": (BASE + 1,),
    "has neither": (),
}
RANKS = 3


def _report(rank: int, kind: str) -> events.Stopped:
    facts: dict[str, typing.Any] = {"torn": False, "blank": kind in LEFT, "step": -1, "version": 0, "prepared": -1}
    facts.update(REPORTS.get(kind, {}))
    return events.Stopped(
        process=f"w{rank}", rank=rank, generation=2, lineage=f"v{facts['version']}", stop_seconds=0.0,
        restore_address="", **facts
    )  # fmt: skip


def _outcome(kinds: Sequence[str]) -> str:
    reports = [_report(rank, kind) for rank, kind in enumerate(kinds)]
    left = {rank: LEFT[kind] for rank, kind in enumerate(kinds) if kind in LEFT}
    match decide(reports, left, RANKS):
        case Decision(direction=direction, target=target):
            return f"{direction} to {'version' if direction == 'as they are' else ''} {target}".replace("  ", " ")
        case Halt(reason=reason):
            text = re.sub(r"ranks? \d+(, \d+)*", "ranks", re.sub(r" \(.*?\)", "", reason))
            return f"halt: {text.partition(': ')[0]}"


def _groups() -> dict[tuple[str, str], set[str]]:
    """Group reports of ranks without their numbers, each with every decision that is taken."""
    groups: dict[tuple[str, str], set[str]] = {}
    for kinds in itertools.product((*REPORTS, *LEFT), repeat=RANKS):
        intact = [kind for kind in REPORTS if kind in kinds and kind != "torn"]
        left = [kind for kind in LEFT if kind in kinds]
        if "ahead" in intact and len(intact) == 1:
            continue  # then that is the base, and the group the one of the next step
        groups.setdefault((" + ".join(intact) or "no rank intact", " + ".join(left) or "none lost"), set()).add(
            _outcome(kinds)
        )
    return groups


def _decision_rows() -> Iterator[tuple[str, str, str]]:
    by_outcome: dict[tuple[str, str], list[str]] = {}
    for (intact, left), outcomes in _groups().items():
        assert len(outcomes) == 1, f"{intact}, {left}: {outcomes}"
        by_outcome.setdefault((intact, min(outcomes)), []).append(left)
    all_left = len({left for _, left in _groups()})
    for (intact, outcome), lefts in by_outcome.items():
        yield intact, "whatever is left" if len(lefts) == all_left else "; ".join(lefts), outcome


# --- the page -----------------------------------------------------------------------------------------------------
def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _planted_rows() -> Iterator[tuple[str, str, str, str]]:
    broken: dict[str, str] = {}
    for path in sorted(REGRESSIONS.glob("*.txt")):
        golden = read_golden(path)
        broken.setdefault(golden.mutation, golden.breaks)
    for mutation in MUTATIONS:
        yield mutation.name, _where(mutation), " ".join(mutation.what.split()), broken.get(mutation.name, "")


def _where(mutation: Mutation) -> str:
    default = Mutation(name="", within=0)
    changed = [
        part
        for part in ("controller", "decisions", "worker", "detector", "agent", "rule")
        if getattr(mutation, part) != getattr(default, part)
    ]
    return ", ".join("worker" if part == "decisions" else part for part in changed)


def page() -> str:
    """All of PROTOCOL.md."""
    decisions = list(_decision_rows())
    return string.Template(TEXT).substitute(
        stages=_table(("stage", "waits for", "its deadline"), _stage_rows()),
        events=_table(("event", "says that", "in stage", "may order", "may go to"), _event_rows()),
        worker_states=_table(("state", "in which a worker"), worker_table.state_rows()),
        worker_events=_table(("event", "in state", "actions", "state after it"), worker_table.event_rows()),
        base=BASE,
        after=BASE + 1,
        cases=len((*REPORTS, *LEFT)) ** RANKS,
        rows=len(_groups()),
        decisions=_table(("intact ranks are", "private state of the lost ones", "decision"), decisions),
        invariants=_table(("name", "must hold"), INVARIANTS.items()),
        planted=_table(("name", "in the", "what is wrong", "breaks"), _planted_rows()),
    )


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PAGE, page()))
