"""Ways to leave a gloo collective whose peer has died or frozen, measured.

A survivor blocked in an all-reduce must come out at once and form a new group in the same process.

cut           shutdown(2) on the group's own connections, both directions: the blocked operation raises,
              the group is dropped, a new one is formed
cut-read      the same, but only the reading direction is shut
abandon       walk away from the stuck operation and keep its group forever, because the destructor would
              wait for it; a new group is formed beside it
cut+abandon   cut-read; what has not raised a moment later is abandoned, the rest is dropped

Four real processes all-reduce in a loop, 1 element three times out of four and 4 MiB the fourth time. In
each trial one of them gets SIGKILL or SIGSTOP (in turns), the survivors are told, and form a new group
with a replacement that was started beforehand. Survivors live on from trial to trial, which is the point:
rank 0 lives through all of a turn. The parent imports torch, never starts a thread and forks every process,
so a replacement costs milliseconds. Takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import enum
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import queue
import random
import select
import signal
import socket
import stat
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

WORLD_SIZE = 4
LARGE_MIB = 4
LARGE_EVERY = 4  # one operation in this many is large
BUCKET_MIB = 25  # DDP's default, in a variant
IN_FLIGHT_OPERATIONS = 8  # in a variant

# Longer than any trial: no rank may get out of a collective because its own timeout ran out.
GROUP_TIMEOUT_S = 300.0
TRIAL_DEADLINE_S = 10.0
# Roads that may walk away wait in slices. A slice ends at once when the operation does.
WAIT_SLICE = datetime.timedelta(milliseconds=5)
# After a cut, operations get this long to fail before they count as stuck.
PATIENCE_S = 0.050
TRAINING_BEFORE_FAULT_S = (0.005, 0.060)
# A detector needs a while: half of the orders come at once, half within this time after the fault, when
# the neighbours of a killed rank have begun to fail by themselves.
DETECTION_DELAY_MAX_S = 0.040
BYSTANDER_CONNECTIONS = 4
BYSTANDER_PAUSE_S = 0.001

# The roads take turns, so that what else runs on the machine meets all of them. A job lives for one turn.
TURNS = 4
LISTENER_TRIALS = 20
VARIANT_TRIALS = 100
SEED = 20240607

RESULTS = Path(__file__).parent / "results" / "stop_collective.json"
PR_SET_PDEATHSIG = 1

fork = multiprocessing.get_context("fork")
Report = TypeVar("Report")


class Road(enum.StrEnum):
    """The way out of a blocked collective."""

    CUT = "cut"
    CUT_READ = "cut-read"
    ABANDON = "abandon"
    CUT_OR_ABANDON = "cut+abandon"

    @property
    def shuts(self) -> int | None:
        """The direction that is shut down."""
        if self is Road.ABANDON:
            return None
        return socket.SHUT_RDWR if self is Road.CUT else socket.SHUT_RD

    @property
    def may_walk_away(self) -> bool:
        """True if an operation may be abandoned."""
        return self in {Road.ABANDON, Road.CUT_OR_ABANDON}


@dataclasses.dataclass(frozen=True)
class Mode:
    """The plan for the ranks of one job; the defaults are the plain comparison."""

    road: Road
    operations: int = 1  # in flight at a time
    large_mib: int = LARGE_MIB
    cut_listener: bool = False
    bystander: bool = False


VARIANTS = {
    "cut, also the listener": Mode(Road.CUT, cut_listener=True),
    "cut, 8 in flight": Mode(Road.CUT, operations=IN_FLIGHT_OPERATIONS),
    "cut-read, 8 in flight": Mode(Road.CUT_READ, operations=IN_FLIGHT_OPERATIONS),
    "cut+abandon, 8 in flight": Mode(Road.CUT_OR_ABANDON, operations=IN_FLIGHT_OPERATIONS),
    "cut+abandon, 25 MiB": Mode(Road.CUT_OR_ABANDON, large_mib=BUCKET_MIB),
    "cut+abandon, other sockets": Mode(Road.CUT_OR_ABANDON, bystander=True),
}


# ------------------------------------------------------------------------------------------- messages


@dataclasses.dataclass(frozen=True)
class Form:
    """Form the group of this generation, then train in it."""

    generation: int
    rank: int
    store_path: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """Leave the collective. The monotonic clock is one for all processes of a host."""

    sent_s: float


@dataclasses.dataclass(frozen=True)
class Finish:
    """Drop everything and exit."""


Order = Form | Stop | Finish


class Stage(enum.IntEnum):
    """The progress of a rank; it lies in shared memory, so that a hang can be placed."""

    IDLE = 0
    TRAINING = 1
    LEAVING = 2
    DROPPING = 3
    FORMING = 4
    FIRST_COLLECTIVE = 5


@dataclasses.dataclass(frozen=True)
class Left:
    """The way a rank came out of its last group, and what training in it had cost."""

    where: str
    out_s: float | None  # order to being out; None if the rank had already failed before the order
    stuck: int  # operations that had not even failed
    drop_s: float
    small_count: int
    small_s: float
    large_count: int
    large_s: float


@dataclasses.dataclass(frozen=True)
class Joined:
    """A rank has finished the first all-reduce of a generation."""

    generation: int
    left: Left | None  # None in a process that has just started
    form_s: float
    first_s: float
    done_s: float  # a point in time
    wrong_sums: int  # since the last report
    fds: int
    threads: int
    resident_bytes: int
    strangers: int  # sockets that appeared with the group without being the group's
    missed: int  # sockets of the group that got the number of one just closed, so that none "appeared"
    bystander_errors: int  # since the last report


@dataclasses.dataclass(frozen=True)
class Finished:
    """All groups of a rank are dropped, but those that would not let go."""

    drop_s: float
    stuck_groups: int


# ------------------------------------------------------------------------------- the sockets of a group


def open_fds() -> set[int]:
    """All descriptors of this process, also that of the listing itself (closed again by now)."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def epoll_fds() -> list[int]:
    """Descriptors of this process that are epoll instances."""
    found = []
    for fd in sorted(open_fds()):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                found.append(fd)
    return found


def watched(epoll_fd: int) -> list[tuple[int, int]]:
    """Descriptor and inode of all that an epoll instance watches, as the kernel tells it."""
    found = []
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll_fd}").read_text().splitlines()
    except FileNotFoundError:  # another thread's, closed meanwhile
        return []
    for line in lines:
        if line.startswith("tfd:"):
            words = line.replace(":", ": ").split()
            found.append((int(words[1]), int(words[words.index("ino:") + 1], 16)))
    return sorted(found)


@contextlib.contextmanager
def pinned_socket(fd: int, inode: int | None = None) -> Iterator[socket.socket | None]:
    """The TCP socket of a descriptor, or None if it is another thing by now.

    Gloo closes the socket of a failed peer on its own thread, and another thread may get the same number
    for something else. The duplicate keeps the thing that was looked at the thing that is used.
    """
    try:
        duplicate = os.dup(fd)
    except OSError:
        yield None
        return
    status = os.fstat(duplicate)
    if not stat.S_ISSOCK(status.st_mode) or (inode is not None and status.st_ino != inode):
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as candidate:
        is_inet = candidate.family in {socket.AF_INET, socket.AF_INET6}
        yield candidate if is_inet and candidate.type == socket.SOCK_STREAM else None


def is_listening(candidate: socket.socket) -> bool:
    """Return whether connections are accepted on it."""
    return candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@dataclasses.dataclass
class Sockets:
    """TCP sockets, as descriptor and inode."""

    listening: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    connected: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    @classmethod
    def among(cls, descriptors: Iterable[tuple[int, int | None]]) -> Sockets:
        """The sockets among these descriptors; what is gone by now is left out."""
        found = cls()
        for fd, inode in descriptors:
            with pinned_socket(fd, inode) as candidate:
                if candidate is not None:
                    kind = found.listening if is_listening(candidate) else found.connected
                    kind.add((fd, os.fstat(candidate.fileno()).st_ino))
        return found

    @classmethod
    def of_this_process(cls) -> Sockets:
        """All of them."""
        return cls.among((fd, None) for fd in sorted(open_fds()))


class Group:
    """A gloo group that knows its own sockets.

    A gloo group watches all its sockets with one epoll instance of its own: one listener and a connection
    to every peer, none of which existed before. So sockets that other threads open at the same time are
    never taken for the group's, and at the time of the cut the kernel says which are left. What existed
    before is known by inode: a descriptor number may be given again to something else at once.
    """

    def __init__(self, order: Form) -> None:
        before = Sockets.of_this_process()
        started_s = time.monotonic()
        store = dist.FileStore(order.store_path, WORLD_SIZE)  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        gloo = dist.ProcessGroupGloo(store, order.rank, WORLD_SIZE, timeout)
        self.process_group = cast(dist.ProcessGroup, gloo)  # torch's stubs give gloo no operations
        self.form_s = time.monotonic() - started_s
        self._epoll_fd, mine = self._find_sockets(before)
        # What merely comparing the open descriptors before and after would have taken for the group's.
        fds_before = {fd for fd, _ in before.listening | before.connected}
        appeared = {entry for entry in Sockets.of_this_process().connected if entry[0] not in fds_before}
        self.strangers, self.missed = len(appeared - mine), len(mine - appeared)

    @staticmethod
    def _find_sockets(before: Sockets) -> tuple[int, set[tuple[int, int]]]:
        old_inodes = {inode for _, inode in before.listening | before.connected}
        found = []
        for fd in epoll_fds():
            new = Sockets.among(entry for entry in watched(fd) if entry[1] not in old_inodes)
            if (len(new.listening), len(new.connected)) == (1, WORLD_SIZE - 1):
                found.append((fd, new.connected))
        if len(found) != 1:
            raise AssertionError(f"{len(found)} epoll instances look like the group's: {found}")
        return found[0]

    def cut(self, direction: int, *, listener: bool) -> None:
        """Shut the connections down. The listener only to show what comes of it."""
        for fd, inode in watched(self._epoll_fd):
            with pinned_socket(fd, inode) as candidate:
                if candidate is not None and (listener or not is_listening(candidate)):
                    with contextlib.suppress(OSError):  # the peer was faster
                        candidate.shutdown(direction)


class Bystander:
    """Opens and closes sockets all the time, as a data loader would, and notices when one is hurt."""

    def __init__(self) -> None:
        self._errors = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._run, daemon=True).start()

    def take_errors(self) -> int:
        """Errors since the last call."""
        errors, self._errors = self._errors, 0
        return errors

    def _run(self) -> None:
        connections: list[tuple[socket.socket, socket.socket, select.epoll]] = []
        while True:
            client = socket.create_connection(self._server.getsockname())
            server, _ = self._server.accept()
            poller = select.epoll()
            poller.register(server, select.EPOLLIN)
            connections.append((client, server, poller))
            for near, far, _ in connections:
                try:
                    near.sendall(b"?")
                    self._errors += far.recv(1) != b"?"
                except OSError:
                    self._errors += 1
            if len(connections) > BYSTANDER_CONNECTIONS:
                for thing in connections.pop(0):
                    thing.close()
            time.sleep(BYSTANDER_PAUSE_S)


# ------------------------------------------------------------------------------------------ one rank


class Operation(NamedTuple):
    """One all-reduce in flight and the buffer that it may write until it has completed."""

    work: dist.Work
    buffer: torch.Tensor


class Abandoned(NamedTuple):
    """An abandoned group, with what must not be freed or reused while it lives."""

    group: Group
    operations: list[Operation]

    def has_let_go(self) -> bool:
        """Return whether the destructor of the group would return."""
        return all(operation.work.is_completed() for operation in self.operations)


class Rank:
    """One training process: the main thread computes, the control thread obeys."""

    def __init__(self, mode: Mode, link: multiprocessing.connection.Connection, stage: ctypes.c_int) -> None:
        self._mode = mode
        self._link = link
        self._stage = stage
        self._orders: queue.SimpleQueue[Form | Finish] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._stop = Stop(sent_s=0.0)
        self._group: Group | None = None
        self._in_flight: list[Operation] = []
        self._abandoned: list[Abandoned] = []
        self._buffers = self._make_buffers()
        self._wrong_sums = 0
        self._bystander = Bystander() if mode.bystander else None

    def run(self) -> None:
        """Form, train, leave, and again, until told to finish."""
        threading.Thread(target=self._obey, daemon=True).start()
        left: Left | None = None
        while isinstance(order := self._orders.get(), Form):
            self._join(order, left)
            left = self._train_and_leave(order.rank)
        started_s = time.monotonic()
        self._drop_what_let_go()
        self._link.send(Finished(time.monotonic() - started_s, len(self._abandoned)))

    def _obey(self) -> None:
        """Control thread: a stop is carried out here, while the main thread is blocked."""
        while True:
            try:
                order: Order = self._link.recv()
            except EOFError:
                return
            if isinstance(order, Stop):
                self._stop = order
                direction = self._mode.road.shuts
                if direction is not None and self._group is not None:
                    self._group.cut(direction, listener=self._mode.cut_listener)
                # Only now may the main thread drop the group: no thread cuts a group that is going away.
                self._closing.set()
            else:
                self._orders.put(order)

    def _join(self, order: Form, left: Left | None) -> None:
        """Form the group, do its first all-reduce, and report."""
        self._closing.clear()
        self._stage.value = Stage.FORMING
        self._group = Group(order)
        self._stage.value = Stage.FIRST_COLLECTIVE
        started_s = time.monotonic()
        first = torch.full((1,), float(order.rank + 1))
        self._group.process_group.allreduce([first]).wait()
        done_s = time.monotonic()
        self._check(first, step=0)
        wrong_sums, self._wrong_sums = self._wrong_sums, 0
        self._link.send(
            Joined(
                generation=order.generation,
                left=left,
                form_s=self._group.form_s,
                first_s=done_s - started_s,
                done_s=done_s,
                wrong_sums=wrong_sums,
                fds=len(open_fds()),
                threads=len(os.listdir("/proc/self/task")),
                resident_bytes=resident_bytes(),
                strangers=self._group.strangers,
                missed=self._group.missed,
                bystander_errors=self._bystander.take_errors() if self._bystander else 0,
            )
        )

    def _train_and_leave(self, rank: int) -> Left:
        """Train until the collective breaks or the order comes, then get rid of the group."""
        self._stage.value = Stage.TRAINING
        cost_s = {"small": [0.0], "large": [0.0]}
        where = self._train(rank, cost_s)
        failed_s = time.monotonic()
        self._stage.value = Stage.LEAVING
        # A neighbour of a killed rank fails before the order: it still leaves by order only.
        self._closing.wait()
        early = failed_s < self._stop.sent_s
        stuck = self._count_stuck() if self._mode.road is Road.CUT_OR_ABANDON else 0
        order_to_out_s = time.monotonic() - self._stop.sent_s
        started_s = time.monotonic()
        self._stage.value = Stage.DROPPING
        self._drop(walk_away=self._mode.road is Road.ABANDON or stuck > 0)
        self._stage.value = Stage.IDLE
        return Left(
            where="before the order" if early else where,
            out_s=None if early else order_to_out_s,
            stuck=stuck,
            drop_s=time.monotonic() - started_s,
            small_count=len(cost_s["small"]) - 1,
            small_s=sum(cost_s["small"]),
            large_count=len(cost_s["large"]) - 1,
            large_s=sum(cost_s["large"]),
        )

    def _train(self, rank: int, cost_s: dict[str, list[float]]) -> str:
        """All-reduce without end; says where it was when it was stopped."""
        assert self._group is not None
        process_group = self._group.process_group
        numbers = itertools.count(1)
        while not self._closing.is_set():
            steps = [next(numbers) for _ in range(self._mode.operations)]
            started_s = time.monotonic()
            try:
                for step in steps:
                    buffer = self._buffers[step % len(self._buffers)]
                    buffer.fill_(float(rank + 1 + step % 7))
                    self._in_flight.append(Operation(process_group.allreduce([buffer]), buffer))
            except RuntimeError:
                return "launching"
            for operation in self._in_flight:
                if not self._settle(operation.work):
                    return "waiting"
            kind = "large" if self._in_flight[-1].buffer.numel() > 1 else "small"
            cost_s[kind].append(time.monotonic() - started_s)
            for step, operation in zip(steps, self._in_flight, strict=True):
                self._check(operation.buffer, step)
            self._in_flight.clear()
        return "between operations"

    def _settle(self, work: dist.Work) -> bool:
        """Wait for one operation; false if it failed or was left alone."""
        if self._mode.road.may_walk_away:
            while not work.is_completed():
                if self._closing.is_set():
                    return False
                with contextlib.suppress(RuntimeError):  # the slice is over, or the operation failed
                    work.wait(WAIT_SLICE)
        try:
            work.wait()
        except RuntimeError:
            return False
        return True

    def _count_stuck(self) -> int:
        """Count the operations that have not completed, be it with an error, a moment after the cut."""
        deadline_s = time.monotonic() + PATIENCE_S
        for operation in self._in_flight:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s > 0 and not operation.work.is_completed():
                with contextlib.suppress(RuntimeError):
                    operation.work.wait(datetime.timedelta(seconds=remaining_s))
        return sum(not operation.work.is_completed() for operation in self._in_flight)

    def _drop(self, *, walk_away: bool) -> None:
        """Get rid of the group.

        An abandoned operation may still write its buffer, so the buffers stay with it. After a cut
        they are used again, on purpose: a late write would show as a wrong sum.
        """
        if walk_away and self._group is not None:
            self._abandoned.append(Abandoned(self._group, list(self._in_flight)))
            self._buffers = self._make_buffers()
        self._in_flight.clear()
        self._group = None

    def _drop_what_let_go(self) -> None:
        self._abandoned = [entry for entry in self._abandoned if not entry.has_let_go()]

    def _make_buffers(self) -> list[torch.Tensor]:
        large = self._mode.large_mib << 18  # float32
        count = max(LARGE_EVERY, self._mode.operations)
        return [torch.zeros(large if i % LARGE_EVERY == 0 else 1) for i in range(count)]

    def _check(self, buffer: torch.Tensor, step: int) -> None:
        expected = float(sum(rank + 1 + step % 7 for rank in range(WORLD_SIZE)))
        if not bool((buffer == expected).all()):
            self._wrong_sums += 1


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_main(mode: Mode, link: multiprocessing.connection.Connection, stage: ctypes.c_int) -> None:
    """Entry of a rank's process. It dies with the parent, also if it is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    if mode.cut_listener:  # it is meant to end in std::terminate: the outcome is counted, the noise is not
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    rank = Rank(mode, link, stage)
    rank.run()
    os._exit(0)  # by the ordinary way out, the destructor of a stuck group would never return


def burn() -> None:
    """A busy loop beside the ranks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        pass


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many busy loops running."""
    loops = [fork.Process(target=burn, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


# ---------------------------------------------------------------------------------------- the parent


class Member:
    """The parent's view of one rank's process."""

    def __init__(self, mode: Mode) -> None:
        self.link, theirs = fork.Pipe()
        self.stage = fork.RawValue("i", Stage.IDLE)
        self.process = fork.Process(target=rank_main, args=(mode, theirs, self.stage), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """End the process, whatever it does, and reap it."""
        self.process.kill()
        self.process.join()
        self.link.close()


class TrialFailedError(Exception):
    """A process ended or hung; the message says which and where."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclasses.dataclass
class Trial:
    """One fault and what came of it."""

    fault: str
    outcome: str
    joined: list[Joined] = dataclasses.field(default_factory=list)
    recovered_s: float = math.nan  # order to the last rank's first all-reduce in the new group


class Job:
    """Four ranks and a replacement, kept from trial to trial."""

    def __init__(self, mode: Mode, directory: Path, rng: random.Random) -> None:
        self._mode = mode
        self._directory = directory
        self._rng = rng
        self._generation = 0
        self._members = {rank: Member(mode) for rank in range(WORLD_SIZE)}
        self._replacement = Member(mode)
        self.oldest: list[Joined] = []  # what rank 0, which is never the victim, reported

    def start(self) -> None:
        """Form the first group, unless there is one."""
        if self.oldest:
            return
        self._order_form()
        self.oldest.append(self._collect(Joined)[0])

    def trial(self, fault: signal.Signals) -> Trial:
        """Break one rank, have the others leave, form again with the replacement."""
        time.sleep(self._rng.uniform(*TRAINING_BEFORE_FAULT_S))
        victim_rank = self._rng.randrange(1, WORLD_SIZE)
        victim = self._members.pop(victim_rank)
        delay_s = self._rng.choice((0.0, self._rng.uniform(0.0, DETECTION_DELAY_MAX_S)))
        assert victim.process.pid is not None
        os.kill(victim.process.pid, fault)
        try:
            if delay_s:
                time.sleep(delay_s)
            stop = Stop(sent_s=time.monotonic())
            for rank in sorted(self._members):
                self._send(rank, stop)
            self._members[victim_rank] = self._replacement
            self._order_form()
            joined = self._collect(Joined)
        finally:
            victim.kill()
        self._replacement = Member(self._mode)
        self.oldest.append(joined[0])
        done_s = max(report.done_s for report in joined.values())
        reports = [joined[rank] for rank in sorted(joined)]
        return Trial(fault.name, "ok", reports, done_s - stop.sent_s)

    def finish(self) -> tuple[float, int]:
        """Let all ranks drop everything and exit; the longest drop, and how many groups were stuck."""
        for rank in sorted(self._members):
            self._send(rank, Stop(sent_s=time.monotonic()))
            self._send(rank, Finish())
        finished = self._collect(Finished)
        for member in self._members.values():
            member.process.join(TRIAL_DEADLINE_S)
            if member.process.exitcode != 0:
                raise TrialFailedError("abort", f"exit code {member.process.exitcode} at the end")
        reports = finished.values()
        return max(report.drop_s for report in reports), sum(report.stuck_groups for report in reports)

    def kill(self) -> None:
        """End whatever is left."""
        for member in {*self._members.values(), self._replacement}:
            member.kill()

    def _order_form(self) -> None:
        self._generation += 1
        path = str(self._directory / f"store-{self._generation}-{self._rng.getrandbits(64):016x}")
        for rank in sorted(self._members):
            self._send(rank, Form(self._generation, rank, path))

    def _send(self, rank: int, order: Order) -> None:
        try:
            self._members[rank].link.send(order)
        except BrokenPipeError:
            raise self._gone(rank) from None

    def _gone(self, rank: int) -> TrialFailedError:
        member = self._members[rank]
        member.process.join(TRIAL_DEADLINE_S)
        stage = Stage(member.stage.value).name
        return TrialFailedError("abort", f"exit code {member.process.exitcode} at {stage}")

    def _collect(self, kind: type[Report]) -> dict[int, Report]:
        """One report of each member, within the deadline."""
        reports: dict[int, Report] = {}
        deadline_s = time.monotonic() + TRIAL_DEADLINE_S
        while pending := {r: m for r, m in self._members.items() if r not in reports}:
            links = [member.link for member in pending.values()]
            ready = multiprocessing.connection.wait(links, deadline_s - time.monotonic())
            if not ready:
                stages = sorted(Stage(member.stage.value).name for member in pending.values())
                raise TrialFailedError("hang", f"{TRIAL_DEADLINE_S:.0f} s at {', '.join(stages)}")
            for rank, member in pending.items():
                if member.link in ready:
                    reports[rank] = self._receive(rank, kind)
        return reports

    def _receive(self, rank: int, kind: type[Report]) -> Report:
        try:
            report = self._members[rank].link.recv()
        except (EOFError, ConnectionResetError):
            raise self._gone(rank) from None
        if not isinstance(report, kind):
            raise AssertionError(f"rank {rank} sent {report} instead of a {kind.__name__}")
        return report


@dataclasses.dataclass
class Series:
    """The trials of one mode under one load."""

    mode: Mode
    load: int
    trials: list[Trial] = dataclasses.field(default_factory=list)
    oldest: list[Joined] = dataclasses.field(default_factory=list)  # rank 0 of the longest-lived job
    finish_s: list[float] = dataclasses.field(default_factory=list)
    finish_outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    stuck_at_finish: int = 0
    # Of the last minute, at the end of each turn: what else ran on the machine shows here.
    load_averages: list[float] = dataclasses.field(default_factory=list)

    def end(self, job: Job) -> None:
        """Note what the job's oldest process had gathered, and end what is left of it."""
        self.oldest = max(self.oldest, job.oldest, key=len)
        job.kill()


def run_turn(series: Series, count: int, directory: Path) -> None:
    """Run trials, in one job for as long as it lives."""
    rng = random.Random(f"{SEED} {series.mode} {series.load} {len(series.trials)}")
    job: Job | None = None
    with busy_loops(series.load):
        for number in range(count):
            fault = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
            job = job or Job(series.mode, directory, rng)
            try:
                job.start()
                trial = job.trial(fault)
            except TrialFailedError as error:
                trial = Trial(fault.name, str(error))
            series.trials.append(trial)
            if trial.outcome != "ok":
                series.end(job)
                job = None
        series.load_averages.append(round(os.getloadavg()[0], 1))
        if job is not None:
            finish(job, series)


def finish(job: Job, series: Series) -> None:
    """End a job in good order."""
    try:
        took_s, stuck = job.finish()
        series.finish_s.append(took_s)
        series.stuck_at_finish += stuck
        series.finish_outcomes["ok"] += 1
    except TrialFailedError as error:
        series.finish_outcomes[str(error)] += 1
    series.end(job)


# ---------------------------------------------------------------------------------------- the results


def spread_ms(values_s: Sequence[float]) -> dict[str, float | int]:
    """Median, 95th percentile (nearest rank) and maximum in milliseconds."""
    if not values_s:
        return {"samples": 0}
    ordered = sorted(values_s)
    rank95 = math.ceil(0.95 * len(ordered)) - 1
    return {
        "samples": len(ordered),
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p95": round(ordered[rank95] * 1e3, 3),
        "max": round(ordered[-1] * 1e3, 3),
    }


def mean_ms(sum_s: float, count: int) -> float | None:
    """Mean in milliseconds."""
    return round(sum_s / count * 1e3, 3) if count else None


def outcomes(trials: Sequence[Trial]) -> dict[str, Any]:
    """Count the trials by their ends, and say what the failures looked like."""
    kinds = Counter(trial.outcome.split(":")[0] for trial in trials)
    return {
        "trials": len(trials),
        "ok": kinds["ok"],
        "hangs": kinds["hang"],
        "aborts": kinds["abort"],
        "failures": dict(sorted(Counter(t.outcome for t in trials if t.outcome != "ok").items())),
    }


def summary(series: Series, fault: str) -> dict[str, Any]:
    """The times of one road under one fault and one load."""
    trials = [trial for trial in series.trials if trial.fault == fault]
    joined = [report for trial in trials for report in trial.joined]
    left = [report.left for report in joined if report.left is not None]
    return {
        "road": series.mode.road.value,
        "fault": fault,
        "load": series.load,
        **outcomes(trials),
        "was": dict(sorted(Counter(item.where for item in left).items())),
        "operations_stuck": sum(item.stuck for item in left),
        "out_ms": spread_ms([item.out_s for item in left if item.out_s is not None]),
        "drop_ms": spread_ms([item.drop_s for item in left]),
        "form_ms": spread_ms([report.form_s for report in joined]),
        "first_all_reduce_ms": spread_ms([report.first_s for report in joined]),
        "recovered_ms": spread_ms([trial.recovered_s for trial in trials if trial.joined]),
    }


def growth(series: Series) -> dict[str, Any]:
    """Figures that rank 0, which lives through all recoveries of a job, gathered in them."""
    recoveries = len(series.oldest) - 1
    if recoveries < 1:
        return {"recoveries": 0}
    first, last = series.oldest[0], series.oldest[-1]
    resident_mib = [report.resident_bytes / 2**20 for report in (first, last)]
    return {
        "recoveries": recoveries,
        "fds_first_last": [first.fds, last.fds],
        "threads_first_last": [first.threads, last.threads],
        "resident_mib_first_last": [round(mib, 1) for mib in resident_mib],
        "fds_per_recovery": round((last.fds - first.fds) / recoveries, 2),
        "threads_per_recovery": round((last.threads - first.threads) / recoveries, 2),
        "resident_mib_per_recovery": round((resident_mib[1] - resident_mib[0]) / recoveries, 2),
    }


def whole(series: Series) -> dict[str, Any]:
    """Figures that do not depend on the fault: sums, healthy cost, leaks, the end."""
    joined = [report for trial in series.trials for report in trial.joined]
    left = [report.left for report in joined if report.left is not None]
    small = sum(item.small_count for item in left)
    large = sum(item.large_count for item in left)
    return {
        "mode": {**dataclasses.asdict(series.mode), "road": series.mode.road.value},
        "load": series.load,
        "load_averages": series.load_averages,
        **outcomes(series.trials),
        "wrong_sums": sum(report.wrong_sums for report in joined),
        "all_reduces_checked": small + large,
        "healthy_small_ms_mean": mean_ms(sum(item.small_s for item in left), small),
        "healthy_large_ms_mean": mean_ms(sum(item.large_s for item in left), large),
        "rank_0": growth(series),
        "finish": dict(sorted(series.finish_outcomes.items())),
        "finish_drop_ms": [round(took_s * 1e3, 1) for took_s in series.finish_s],
        "groups_stuck_at_finish": series.stuck_at_finish,
        "operations_stuck": sum(item.stuck for item in left),
        "ranks_with_stuck_operations": sum(item.stuck > 0 for item in left),
        "sockets_of_others_that_appeared": sum(report.strangers for report in joined),
        "own_sockets_that_did_not_appear": sum(report.missed for report in joined),
        "bystander_errors": sum(report.bystander_errors for report in joined),
    }


def cpu_model() -> str:
    """The processor's name, as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def environment() -> dict[str, Any]:
    """The conditions on which the figures depend."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


COLUMNS = ("out_ms", "drop_ms", "form_ms", "first_all_reduce_ms", "recovered_ms")


def print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """One line per road, fault and load; times as median / 95th percentile / maximum."""
    names = ("out", "drop", "form", "first all-reduce", "recovered")
    print("milliseconds: median / p95 / max")
    heading = f"{'road':11} {'fault':7} {'load':>4} {'trials':>6} {'hangs':>5} {'aborts':>6} {'stuck':>5}"
    print(heading + "".join(f" {name:>21}" for name in names))
    for row in sorted(rows, key=lambda row: (row["fault"], row["load"])):
        line = f"{row['road']:11} {row['fault']:7} {row['load']:>4} {row['trials']:>6}"
        line += f" {row['hangs']:>5} {row['aborts']:>6} {row['operations_stuck']:>5}"
        for column in COLUMNS:
            parts = [f"{row[column][key]:.1f}" for key in ("median", "p95", "max") if key in row[column]]
            line += f" {' / '.join(parts):>21}"
        print(line)


def print_whole(name: str, row: dict[str, Any]) -> None:
    """The rest of one series in a few lines."""
    print(
        f"\n{name}, load {row['load']}: {row['ok']} of {row['trials']} trials ok, {row['hangs']} hangs, "
        f"{row['aborts']} aborts, {row['wrong_sums']} wrong sums in {row['all_reduces_checked']} all-reduces"
    )
    for failure, count in row["failures"].items():
        print(f"  {count} x {failure}")
    print(f"  operations stuck: {row['operations_stuck']}, in {row['ranks_with_stuck_operations']} ranks")
    print(f"  rank 0: {row['rank_0']}")
    print(f"  end: {row['finish']}, {row['groups_stuck_at_finish']} groups would not let go")
    if row["mode"]["bystander"]:
        strangers, missed = row["sockets_of_others_that_appeared"], row["own_sockets_that_did_not_appear"]
        print(f"  comparing descriptors would have hit {strangers} foreign sockets and missed {missed}")
        print(f"  transfers of others that were hurt: {row['bystander_errors']}")


def measure(trials: int, load: int, directory: Path) -> dict[str, Any]:
    """The whole experiment."""
    plain = [Series(Mode(road), loops) for loops in sorted({0, load}) for road in Road]
    for turn, series in itertools.product(range(TURNS), plain):
        run_turn(series, trials // TURNS + (turn < trials % TURNS), directory)
        print(f"turn {turn + 1} of {TURNS}: {series.mode.road}, load {series.load}", flush=True)
    comparison = [summary(series, fault) for series in plain for fault in ("SIGKILL", "SIGSTOP")]
    wholes = [whole(series) for series in plain]
    for row in wholes:
        print_whole(row["mode"]["road"], row)
    variants: dict[str, dict[str, Any]] = {}
    for name, mode in VARIANTS.items():
        series = Series(mode, load=0)
        run_turn(series, LISTENER_TRIALS if mode.cut_listener else VARIANT_TRIALS, directory)
        variants[name] = whole(series)
        print_whole(name, variants[name])
    print()
    print_comparison(comparison)
    return {"comparison": comparison, "series": wholes, "variants": variants}


def positive(text: str) -> int:
    """An argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--trials",
        type=positive,
        default=160,
        metavar="N",
        help="trials of each road, without load and again under load; half kill, half stop (default: 160)",
    )
    parser.add_argument(
        "--load",
        type=positive,
        default=2,
        metavar="K",
        help="busy loops that run beside the loaded half (default: 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="the JSON file to write (default: results/stop_collective.json beside this file)",
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stop-collective-") as directory:
        results = measure(arguments.trials, arguments.load, Path(directory))
    document = {
        "benchmark": "stop_collective",
        "date": datetime.date.today().isoformat(),
        "took_s": round(time.monotonic() - started_s),
        "environment": environment(),
        "settings": {
            "ranks": WORLD_SIZE,
            "trials_per_road_and_load": arguments.trials,
            "load": arguments.load,
            "trial_deadline_s": TRIAL_DEADLINE_S,
            "wait_slice_s": WAIT_SLICE.total_seconds(),
            "patience_s": PATIENCE_S,
            "detection_delay_max_s": DETECTION_DELAY_MAX_S,
        },
        **results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
