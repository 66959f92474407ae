"""Reads stacks as faulthandler writes them. Pure.

Thread 0x00007f7d7f1ff6c0 (most recent call first):
  File "/job/train.py", line 40 in load

Current thread 0x00007fd0786b7b80 (most recent call first):
  File "/job/train.py", line 88 in <module>
"""

import re

import msgspec

MAX_FRAMES = 30
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MINE = re.compile(r"^(Current thread |Stack \(most recent)")
_NOT_THE_SCRIPT = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/relight/(training|transfer)/")


class Frame(msgspec.Struct, frozen=True):
    """One call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}, line {self.line} in {self.function}"


def main_frames(stack: str) -> tuple[Frame, ...]:
    """The calls of the thread that took the signal, which is the main one; innermost first."""
    frames: list[Frame] = []
    mine = False
    for line in stack.splitlines():
        found = _FRAME.fullmatch(line)
        if found is None:
            mine = bool(_MINE.match(line))
        elif mine and len(frames) < MAX_FRAMES:
            frames.append(Frame(found[1], int(found[2]), found[3]))
    return tuple(frames)


def describe_place(stack: str) -> str:
    """Describe a process's place in its script: "train.py, line 88 in load (in recv of socket.py, line 5)"."""
    frames = main_frames(stack)
    if not frames:
        return ""
    inner = frames[0]
    own = next((frame for frame in frames if not _NOT_THE_SCRIPT.search(frame.file)), inner)
    if own is inner:
        return str(own)
    return f"{own} (in {inner.function} of {inner.file.rpartition('/')[2]}, line {inner.line})"
