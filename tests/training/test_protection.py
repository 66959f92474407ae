"""Interruption of forward passes after a failure elsewhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from relight.core.protocol.commands import Stop
from relight.core.protocol.fault import Plan
from relight.core.worker.worker import Worker
from relight.errors import StepInterrupted
from relight.training.connection.page import PositionPage
from relight.training.process.controller.notices import Notices
from relight.training.process.faults import Faults
from relight.training.process.groups import ProcessGroups
from relight.training.process.protection import Protection
from tests.training.agent_end import AgentEnd


class NoListener:
    """A listener of a link that is never started."""

    def receive(self, message: object) -> None:
        raise AssertionError(message)

    def reconnected(self) -> None:
        raise AssertionError


@pytest.fixture
def protection(tmp_path: Path) -> Iterator[Protection]:
    """The answers of rank 0, in a step whose generation was closed by a failure of rank 1."""
    page, worker = PositionPage(-1), Worker(0, is_standby=False)
    faults = Faults(Plan(), page, None, lambda: None, lambda _: None, lambda _: None)
    end = AgentEnd(tmp_path / "agent.sock", NoListener())
    notices = Notices(end.link, "w0", worker, faults)
    protection = Protection(worker, page, ProcessGroups(2), notices, lambda _: True)
    protection.started = protection.in_step = True
    worker.handle(Stop(generation=worker.newest + 1, why="rank 1 was lost"))
    protection.stop_forwards()
    yield protection
    protection.let_forwards_run()
    end.close()


def test_a_forward_pass_ends_early(protection: Protection) -> None:
    with pytest.raises(StepInterrupted):
        nn.Identity()(torch.ones(1))
    protection.let_forwards_run()
    nn.Identity()(torch.ones(1))


@pytest.mark.usefixtures("protection")
def test_a_module_that_a_forked_process_calls_is_not_interrupted() -> None:
    """As a DataLoader's worker that an interrupted step has started, whose `collate_fn` calls transforms."""
    child = os.fork()
    if child == 0:
        try:
            nn.Identity()(torch.ones(1))
        except StepInterrupted:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
