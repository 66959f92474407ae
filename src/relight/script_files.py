"""The files that belong to the script: not to Python, to an installed package, or to relight.

Training code is often installed itself (`pip install .` in an image, then `relight run -m acme.train`). The package
that calls `relight.Training` and asks for steps, or has a framework's trainer do so, is therefore the script's own,
wherever it lies.
"""

import functools
import inspect
import sys
import sysconfig
import weakref
from pathlib import Path
from types import FrameType, FunctionType

_PYTHON = tuple(str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("purelib", "platlib"))
_NAMES = ("/site-packages/", "/dist-packages/")  # of directories that packages are installed into
_FRAMEWORKS = frozenset(  # packages whose code calls relight's integrations
    {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchtitan", "transformers", "trl"}
)
_RELIGHT = str(Path(__file__).parent.resolve()) + "/"
_adopted: set[str] = set()  # packages, or modules that are one file, that are the script's own


class WordsOfClasses:
    """Remembers a word about each class, and keeps no class alive: steps may make classes of their own."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}  # by `id` of the class
        self._classes: dict[int, weakref.ref[type]] = {}

    def put(self, kind: type, word: str) -> str:
        """Remember this word as long as the class lives, and return it."""
        key = id(kind)

        def forget(_: object) -> None:
            self.found.pop(key, None)
            self._classes.pop(key, None)

        self._classes[key], self.found[key] = weakref.ref(kind, forget), word
        return word


_files = WordsOfClasses()


@functools.cache
def is_script_file(name: str) -> bool:
    """Return whether a file belongs to the script."""
    if not name or name.startswith("<"):
        return False
    path = str(Path(name).resolve())
    if is_file_of_relight(path):
        return False
    root = _root_of_packages(path)
    if root:
        return _package_of(path, root) in _adopted
    return not path.startswith(_PYTHON)


@functools.cache
def is_file_of_relight(name: str) -> bool:
    """Return whether a file is part of relight, an integration for example."""
    return str(Path(name).resolve()).startswith(_RELIGHT)


@functools.cache
def is_script_module(name: str) -> bool:
    """Return whether a module, by its name, belongs to the script; also one that has no file."""
    if name in ("__main__", "__mp_main__"):
        return True
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_script_file(file)


def file_of_type(kind: type) -> str:
    """Return the file that defines a class; empty if none is known."""
    found = _files.found.get(id(kind))
    return _files.put(kind, _look_up_file(kind)) if found is None else found


def _look_up_file(kind: type) -> str:
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):
        files = [m.__code__.co_filename for m in vars(kind).values() if isinstance(m, FunctionType)]
        return next((name for name in files if is_script_file(name)), "")


def is_user_type(kind: type) -> bool:
    """Return whether a class is the user's own."""
    return is_script_file(file_of_type(kind))


def adopt_caller(frame: FrameType | None) -> None:
    """Count the installed package whose code calls relight, if it is one, as the script's own.

    An integration is called by its framework, and that by the script.
    """
    while frame is not None and _passes_calls_on(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return
    path = str(Path(frame.f_code.co_filename).resolve())
    root = _root_of_packages(path)
    if not root or (package := _package_of(path, root)) in _adopted:
        return
    _adopted.add(package)
    is_script_file.cache_clear()
    is_script_module.cache_clear()


def _passes_calls_on(name: str) -> bool:
    """Return whether code of a file calls relight for the script: relight's own, a framework's, and Python's."""
    if name.startswith("<") or is_file_of_relight(name):
        return True
    path = str(Path(name).resolve())
    root = _root_of_packages(path)
    return Path(path).relative_to(root).parts[0] in _FRAMEWORKS if root else path.startswith(_PYTHON)


def _root_of_packages(path: str) -> str:
    """Return the directory of installed packages that a file lies in; empty: in none."""
    for root in _PACKAGES:
        if path.startswith(root):
            return root
    ends = [at + len(name) for name in _NAMES if (at := path.rfind(name)) >= 0]
    return path[: max(ends)] if ends else ""


def _package_of(path: str, root: str) -> str:
    """Return the directory of a file's outermost package, or the file itself if it is a module in no package."""
    first, *inner = Path(path).relative_to(root).parts
    home = Path(root, first)
    while len(inner) > 1 and not (home / "__init__.py").exists():  # namespaces, which several packages share
        home /= inner.pop(0)
    return str(home)
