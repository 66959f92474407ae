"""Asks the controller of a running job for something by hand, and shows what it says until there is an answer."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.agent.connection.controller_connection import ControllerConnection
from relight.errors import ProtocolError, UsageError
from relight.wire import messages as msg
from relight.wire.connection.address import read_address
from relight.wire.connection.framing import make_decoder
from relight.wire.connection.tls import Tls
from relight.wire.settings import END_BY_HAND

WAIT_SECONDS = 1800.0  # for standbys on other hosts to be warm, for a step, and for a checkpoint
Judge = Callable[[msgspec.Struct], int | None]  # the exit status that an answer means; None: it is not the answer


def drain(run_dir: Path, host: str, token: bytes, tls: Tls | None = None) -> int:
    """Drain a host of a running job, and return the exit status: 0 once no rank is left on it."""

    def judge(answer: msgspec.Struct) -> int | None:
        if isinstance(answer, msg.DrainAnswer) and answer.host == host:
            return int(answer.refused)
        if isinstance(answer, msg.JobEnded):
            print("relight: the job has ended", flush=True)
            return 1
        return None

    return _ask(run_dir, token, tls, msg.DrainHost(host=host, why="relight drain"), judge, f"{host} was not given back")


def end(run_dir: Path, token: bytes, tls: Tls | None = None) -> int:
    """End a running job after its next step and a checkpoint; return the exit status: 0 once it has ended."""

    def judge(answer: msgspec.Struct) -> int | None:
        if not isinstance(answer, msg.JobEnded):
            return None
        print(f"relight: the job has ended: {answer.error or 'training finished'}", flush=True)
        return 0

    return _ask(run_dir, token, tls, msg.StopAgent(why=END_BY_HAND), judge, "the job did not end")


def _ask(run_dir: Path, token: bytes, tls: Tls | None, question: msgspec.Struct, judge: Judge, late: str) -> int:
    address = read_address(run_dir)
    if address is None:
        raise UsageError(f"{run_dir} names no controller: the job keeps to one host, or has not started")
    try:
        return asyncio.run(_converse(address, token, tls, question, judge))
    except TimeoutError:
        print(f"relight: {late} within {WAIT_SECONDS:g} s", flush=True)
    except (OSError, ProtocolError) as error:
        print(f"relight: the controller at {address[0]}:{address[1]} does not answer: {error}", flush=True)
    return 1


async def _converse(
    address: tuple[str, int], token: bytes, tls: Tls | None, question: msgspec.Struct, judge: Judge
) -> int:
    hello = msg.Hello(protocol_version=msg.PROTOCOL_VERSION, role="observer", name=f"hand-{os.getpid()}", mac=b"")
    decoder = make_decoder(msg.ObserverDown)
    connection, _ = await ControllerConnection.connect(address, token, hello, tls=tls, decoder=decoder)
    try:
        connection.send(question)
        async with asyncio.timeout(WAIT_SECONDS):
            while (update := await connection.receive()) is not None:
                if isinstance(update, msg.NoticeUpdate):
                    print(f"relight: {update.text}", flush=True)
                elif (status := judge(update)) is not None:
                    return status
        print("relight: the controller hung up; look at `relight status`", flush=True)
        return 1
    finally:
        connection.abort()
