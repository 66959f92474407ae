"""`python -m relight.dashboard --run-dir DIR`: the page of one job as a process of its own."""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path

from relight.dashboard.server import Dashboard
from relight.dashboard.web.address import DEFAULT_PORT, page_url, split_address
from relight.dashboard.web.guard import is_loopback
from relight.parent import end_with_parent

NICE = 10  # training comes first


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal comes; return the exit status."""
    parser = argparse.ArgumentParser(prog="relight.dashboard", description="A live page about one job.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the directory of the run")
    parser.add_argument("--address", default="", metavar="HOST:PORT", help="where to listen")
    parser.add_argument("--parent", type=int, default=0, help="end when this parent process ends")
    parsed = parser.parse_args(arguments)
    if parsed.parent:
        end_with_parent(parsed.parent)
    return serve(parsed.run_dir, parsed.address)


def serve(run_dir: Path, address: str, token: str = "") -> int:
    """Serve the page of `run_dir` at `address` ("HOST:PORT", either part may be missing) until a signal comes.

    `token` is what others than this machine must know; empty: a new one.
    """
    os.nice(NICE)
    try:
        host, port = split_address(address)
        return asyncio.run(_serve(run_dir, host, port, token))
    except ValueError as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(
            f"relight: the dashboard cannot listen on {address}: {error.strerror or error}", file=sys.stderr, flush=True
        )
        return 1


async def _serve(run_dir: Path, host: str, port: int | None, token: str) -> int:
    token = "" if is_loopback(host) else token or secrets.token_urlsafe(24)
    dashboard = Dashboard(run_dir, token)
    try:
        port = await dashboard.listen(host, DEFAULT_PORT if port is None else port)
    except OSError:
        if port is not None:
            raise
        port = await dashboard.listen(host, 0)  # another job's page has the usual one
    print(f"relight: dashboard at {page_url(host, port, token)}", flush=True)
    running = asyncio.create_task(dashboard.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return 0


if __name__ == "__main__":
    sys.exit(main())
