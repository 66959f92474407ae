"""Builds the late device with g++ and the headers that torch brings along: python -m tests.device_extension.build"""

import concurrent.futures
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "csrc").glob("*.cpp"))
HEADERS = sorted((HERE / "csrc").glob("*.h"))
OUTPUT = HERE / "build"
LIBRARY = OUTPUT / "_late.so"
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-sign-compare",
    "-Wno-unknown-pragmas",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    *(
        f"-isystem{path}"
        for path in (
            _TORCH / "include",
            _TORCH / "include" / "torch" / "csrc" / "api" / "include",
            Path(sysconfig.get_path("include")),
        )
    ),
)


def is_built() -> bool:
    """Return whether the library is there, made from these sources for this torch."""
    stamp = OUTPUT / "stamp"
    return LIBRARY.exists() and stamp.exists() and stamp.read_text() == _stamp()


def build() -> None:
    """Compile each source that has changed, two at a time, and link."""
    if is_built():
        return
    OUTPUT.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(_compile, SOURCES))
    libraries = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    place = _TORCH / "lib"
    _run("g++", "-shared", *objects, f"-L{place}", f"-Wl,-rpath,{place}", *libraries, "-o", str(LIBRARY))
    (OUTPUT / "stamp").write_text(_stamp())


def _compile(source: Path) -> str:
    made = OUTPUT / f"{source.stem}.{_digest(source, *HEADERS)}.o"
    if not made.exists():
        _run("g++", *_FLAGS, "-c", str(source), "-o", str(made))
    return str(made)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths) + torch.__version__.encode()).hexdigest()[:16]


def _stamp() -> str:
    return _digest(*SOURCES, *HEADERS)


if __name__ == "__main__":
    build()
    sys.exit(0)
