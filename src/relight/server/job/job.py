"""The job, as all parts of its server see it."""

from dataclasses import dataclass

from relight.core.controller import Controller
from relight.server.job.clock import JobClock
from relight.server.job.refusals import Refusals
from relight.server.network.agents import Agents
from relight.server.network.observers import Observers
from relight.server.network.store import Store
from relight.server.records.journal import Journal
from relight.server.records.status import StatusBoard
from relight.timeline.model.publications import Publications
from relight.wire.settings import JobSettings


@dataclass(frozen=True)
class Job:
    """The objects that hold the state of one job; each belongs to one part, and others read it."""

    settings: JobSettings
    core: Controller
    journal: Journal
    clock: JobClock
    agents: Agents
    store: Store
    board: StatusBoard
    observers: Observers
    publications: Publications
    refusals: Refusals
