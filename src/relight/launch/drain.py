"""`relight drain`: ask a job's controller to leave a host in order, and wait until the host is given back."""

import asyncio
import os
from pathlib import Path

from relight.agent.connection.controller_connection import ControllerConnection
from relight.errors import ProtocolError, UsageError
from relight.wire.connection.address import read_address
from relight.wire.connection.framing import encode_frame, make_decoder
from relight.wire.connection.tls import Tls
from relight.wire.messages import PROTOCOL_VERSION, DrainAnswer, DrainHost, Hello, JobEnded, NoticeUpdate, ObserverDown

WAIT_SECONDS = 1800.0  # for standbys on other hosts to be warm, and for a step


def drain(run_dir: Path, host: str, token: bytes, tls: Tls | None = None) -> int:
    """Drain a host of a running job, and return the exit status: 0 once no rank is left on it."""
    address = read_address(run_dir)
    if address is None:
        raise UsageError(f"{run_dir} names no controller: the job keeps to one host, or has not started")
    try:
        return asyncio.run(_drain(address, host, token, tls))
    except TimeoutError:
        print(f"relight: {host} was not given back within {WAIT_SECONDS:g} s", flush=True)
    except (OSError, ProtocolError) as error:
        print(f"relight: the controller at {address[0]}:{address[1]} does not answer: {error}", flush=True)
    return 1


async def _drain(address: tuple[str, int], host: str, token: bytes, tls: Tls | None) -> int:
    hello = Hello(protocol_version=PROTOCOL_VERSION, role="observer", name=f"drain-{os.getpid()}", mac=b"")
    decoder = make_decoder(ObserverDown)
    connection, _ = await ControllerConnection.connect(address, token, hello, tls=tls, decoder=decoder)
    try:
        connection.send(encode_frame(DrainHost(host=host, why="relight drain")))
        async with asyncio.timeout(WAIT_SECONDS):
            while (update := await connection.receive()) is not None:
                match update:
                    case NoticeUpdate():
                        print(f"relight: {update.text}", flush=True)
                    case DrainAnswer() if update.host == host:
                        return int(update.refused)
                    case JobEnded():
                        print("relight: the job has ended", flush=True)
                        return 1
        print("relight: the controller hung up; look at `relight status`", flush=True)
        return 1
    finally:
        connection.abort()
