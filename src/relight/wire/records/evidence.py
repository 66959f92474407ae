"""Records of each committed step by a worker of `relight prove`, one JSON line each.

The lines of a process are in RUN_DIR/evidence/PROCESS.jsonl. Digests are hexadecimal; what is a number, is written out.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

DIRECTORY = "evidence"


class StepEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step on one rank."""

    step: int
    rank: int
    process: str
    generation: int
    attempt: int  # how often it was started before
    state: dict[str, str]  # what training changes, by its path
    flags: dict[str, str] = {}  # of modules: what no tensor shows
    names: dict[str, str] = {}  # of the script, as they were when this attempt began: plain values alone
    operations: tuple["Operation", ...] = ()  # of this step, if it was asked for


class Operation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One call of a torch function in a step, by the script or by what it calls."""

    place: str  # "train.py:31", the innermost line of the script
    name: str  # "Tensor.mul"
    given: tuple[str, ...]  # its arguments: digests of tensors, numbers written out
    result: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StepEvidence)


def encode_step(evidence: StepEvidence) -> bytes:
    return _encoder.encode(evidence) + b"\n"


def evidence_path(run_dir: str | Path, process: str) -> Path:
    return Path(run_dir) / DIRECTORY / f"{process}.jsonl"


def read_evidence(run_dir: str | Path) -> Iterator[StepEvidence]:
    """Read the records of all processes, without a last line that was cut short when its process was killed."""
    for path in sorted((Path(run_dir) / DIRECTORY).glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield _decoder.decode(line)
