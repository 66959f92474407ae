"""The file in which a worker of `relight doctor` lists what it protects: RUN_DIR/examined/PROCESS.json."""

from pathlib import Path

import msgspec

DIRECTORY = "examined"


class Protected(msgspec.Struct, frozen=True, kw_only=True):
    """One object that was handed over."""

    name: str
    kind: str  # its class
    tensors: int = 0
    nbytes: int = 0  # of these; 0: no tensors were counted


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as a recovery would find it when a step begins."""

    rank: int
    steps: int  # committed until then
    protected: tuple[Protected, ...]
    has_data: bool = True  # the position in the data is among them
    carried: tuple[str, ...] = ()  # variables of the script, with their lines
    risk: str = ""  # why any recovery would make the bits doubtful; empty: none would
    of_machine: tuple[str, ...] = ()  # notices about the host, which no script can change


def write_examined(run_dir: str | Path, process: str, found: Examined) -> None:
    """Write it in place of what was written before. Raises OSError."""
    path = Path(run_dir) / DIRECTORY / f"{process}.json"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(found))
    draft.replace(path)


def read_examined(run_dir: str | Path) -> list[Examined]:
    """Read what all ranks wrote, by rank. Raises OSError or msgspec.DecodeError."""
    paths = (Path(run_dir) / DIRECTORY).glob("*.json")
    return sorted((msgspec.json.decode(path.read_bytes(), type=Examined) for path in paths), key=lambda one: one.rank)
