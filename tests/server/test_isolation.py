"""A controller that hears no other host asks Slurm whether it is the one that is cut off."""

import asyncio
from pathlib import Path

import pytest

from relight.server.network.agents import Agents
from relight.server.network.connection import Connection
from relight.server.sessions.isolation import Isolation


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that `squeue` touches; it says that this node is not one of the job's."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n: > {tmp_path}/asked\necho n3\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return tmp_path / "asked"


class _Quiet(asyncio.Protocol):
    """The other end of a connection, which is only held."""


@pytest.mark.parametrize("begins", [True, False])
def test_slurm_is_asked_once_no_other_host_is_heard(asked: Path, begins: bool) -> None:
    async def check() -> None:
        given_way: list[str] = []
        isolation = Isolation(given_way.append, begins=begins)
        assert bool(isolation.doubt()) == (not begins)  # of a job that begins no host has joined yet
        assert asked.exists() == (not begins)
        asked.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_server(_Quiet, "127.0.0.1", 0)
        agents = isolation.agents = Agents()
        for name in ("node-0", "node-1"):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            agents.add(name).attach(Connection(reader, writer), ())
        assert not isolation.doubt()
        assert not asked.exists()
        assert not given_way
        agents.remove(next(agent for agent in agents if agent.name == "node-1"))
        assert isolation.doubt() == "Slurm has taken n1 out of the job"
        assert given_way == ["no other host is heard, and Slurm has taken n1 out of the job"]
        server.close()

    asyncio.run(check())
