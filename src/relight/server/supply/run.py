"""Runs one command to its end, within a time limit, and keeps the beginning of what it prints."""

import asyncio
import contextlib
import os
import signal

from relight.server.supply.backend import Call
from relight.wire.settings import HOST_ADDRESS

MAX_OUTPUT_BYTES = 64 * 1024
MAX_READS = 64  # of what is left in a pipe once a command has ended
MAX_WORDS = 300  # characters of a command's own words, for people


class Failed(Exception):
    """A command did not do its work, and why. `uncertain`: it may have done it all the same."""

    def __init__(self, words: str, *, uncertain: bool = False) -> None:
        super().__init__(words)
        self.uncertain = uncertain


async def run_command(call: Call, seconds: float) -> str:
    """Run a command to its end; return its standard output. Raises Failed."""
    environment = {
        name: value for name, value in os.environ.items() if name != HOST_ADDRESS
    }  # the new host has its own
    for name, value in call.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    output, errors = _Output(), _Output()
    try:
        status = await _run_with(call.command, environment, output, errors, seconds)
    finally:
        output.close()
        errors.close()
    if status:
        words = " ".join((errors.kept or output.kept).decode(errors="replace").split())[:MAX_WORDS]
        raise Failed(words or f"it ended with status {status}", uncertain=status < 0)
    return output.kept.decode(errors="replace")


async def _run_with(
    command: tuple[str, ...], environment: dict[str, str], output: "_Output", errors: "_Output", seconds: float
) -> int:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.write_end,
            stderr=errors.write_end,
            env=environment,
            start_new_session=True,  # so that all that it started can be killed with it
        )
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror or error}") from None
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        raise Failed(f"it did not end within {seconds:g} s, and was killed", uncertain=True) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class _Output:
    """The beginning of what a command prints. A process that the command leaves may keep the pipe open."""

    def __init__(self) -> None:
        self.kept = b""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._take)

    def _take(self) -> bool:
        """Read what is there, and keep the first bytes: a command that prints without end must not fill the memory."""
        try:
            chunk = os.read(self._read_end, MAX_OUTPUT_BYTES)
        except BlockingIOError:
            return False
        self.kept += chunk[: MAX_OUTPUT_BYTES - len(self.kept)]
        return bool(chunk)

    def close(self) -> None:
        """Read the rest of what is there."""
        os.close(self.write_end)
        asyncio.get_running_loop().remove_reader(self._read_end)
        for _ in range(MAX_READS):
            if not self._take():
                break
        os.close(self._read_end)
