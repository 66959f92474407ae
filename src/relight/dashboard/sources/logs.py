"""The end of a rank's log, as text for the page."""

import os
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 * 1024


def read_tail(run_dir: Path, rank: int, since: int | None) -> dict[str, Any]:
    """Return a log from byte `since` on, or its last 64 KiB; `end` is where to continue next time.

    Bytes that are not UTF-8 are replaced. A log that is not there is empty: the rank has printed nothing.
    """
    try:
        with (run_dir / "logs" / f"rank-{rank}.log").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - TAIL_BYTES)
            if since is not None and begin <= since <= size:
                begin = since
            file.seek(begin)
            data = file.read(TAIL_BYTES)
    except OSError:
        return {"begin": 0, "end": 0, "text": ""}
    if begin and begin != since:  # begin with a whole line
        cut = data.find(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    end = data.rfind(b"\n") + 1 or len(data)
    return {"begin": begin, "end": begin + end, "text": data[:end].decode("utf-8", "replace")}
