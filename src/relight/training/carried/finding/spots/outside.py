"""Values that no name stands for: read and set by functions. Environment, contexts, databases in memory."""

import contextlib
import contextvars
import decimal
import functools
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from relight.training.carried.code.refs import Place
from relight.training.carried.finding.spots.files import Files
from relight.training.carried.finding.spots.spot import MISSING, FunctionSpot, Spot
from relight.training.carried.reading.flow import ASKED_FOR
from relight.training.state.torch_settings import SETTINGS, of_thread
from relight.training.torch_private.tensors import print_options, set_print_options

CONTENTS = ("contents", "", "")  # the last part of a place: what an object of Python's own holds
_VARIABLES: dict[bytes, bytes] = vars(os.environ)["_data"]  # the environment, not decoded at each look
_OF_WORKERS = frozenset({b"RANK", b"LOCAL_RANK"})  # relight sets them in a replacement
_OF_TORCH = ("autocast", "device", "threads")  # of the thread that trains: the others are in every copy of the state
_NUMPY_FUNCTIONS = ("formatter", "override_repr")  # among its print options
_COUNTS = (24, 40, 92)  # in the header of an SQLite database
_MOST_BYTES = 2**20  # of a database that is looked into


_last_change = [object()]  # of the environment, by whatever part of the script


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method that changes the environment leave another object there: to compare all variables takes 15 us."""

    @functools.wraps(method)
    def change(*arguments: Any) -> None:
        try:
            method(*arguments)
        finally:
            _last_change[0] = object()

    return change


for _name in ("__setitem__", "__delitem__"):  # through which all the others go
    setattr(type(os.environ), _name, _counted(getattr(type(os.environ), _name)))
_environment_token = functools.partial(operator.itemgetter(0), _last_change)


class Setting(Spot):
    """A setting of the process, as a text, which is written anew only once the setting is another one."""

    def __init__(
        self,
        look: Callable[[], Any],
        change: Callable[[Any], object],
        value: Callable[[Any], Any] = lambda seen: seen,
        token: Callable[[], Any] | None = None,
    ) -> None:
        """`value`: of what a look has seen; it can be written down, and is given to `change`.

        `token`: gives an object that is another one once the setting has changed; None: it has to be looked at.
        """
        self.look, self._change, self._value, self.token = look, change, value, token
        self._seen: Any = MISSING
        self._known: Any = None
        self._text = ""

    def get(self) -> str:
        token = self.token() if self.token is not None else None
        if token is not None and token is self._known:
            return self._text
        self._known, seen = token, self.look()
        if self._seen is MISSING or seen != self._seen:
            self._seen = seen
            self._text = json.dumps(self._value(self._seen))
        return self._text

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self._change(json.loads(value))


class Settings:
    """Settings of the process that steps may change."""

    def __init__(self) -> None:
        self._environment = dict(_VARIABLES)
        self.files = Files()
        self.spots: dict[str, Setting] = {
            "os.environ": Setting(_VARIABLES.copy, self._set_environment, self._new_variables, _environment_token),
            "decimal.getcontext()": Setting(_decimal_context, _set_decimal_context, _decimal_values),
            "numpy.geterr()": Setting(_numpy_errors, _set_numpy_errors, token=_errors_token),
            "numpy.get_printoptions()": Setting(_numpy_printing, _set_numpy_printing, token=_printing_token),
            "torch.set_printoptions()": Setting(print_options, set_print_options),
            "sys.getrecursionlimit()": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
            "files that steps read": Setting(lambda: self.files.names, self.files.take, sorted),
            ASKED_FOR: Setting(lambda: None, lambda _: None),
            **{f"torch's {name}": Setting(*SETTINGS[name]) for name in _OF_TORCH},
        }
        self._looks = [spot.token or spot.look for name, spot in self.spots.items() if not name.startswith("torch's ")]
        self._looks.append(of_thread.now)

    def look(self) -> list[Any]:
        """Return a list that is another one, by its values, once some setting is."""
        return list(map(operator.call, self._looks))

    def all(self) -> Iterator[tuple[Place, Any]]:
        """Their places and values."""
        for name, spot in self.spots.items():
            yield (("setting", "", name),), spot.get()

    def _new_variables(self, now: dict[bytes, bytes]) -> dict[str, str | None]:
        """Variables that differ from those at the start; None: they are gone."""
        before = self._environment
        names = sorted({*before, *now} - _OF_WORKERS)
        return {os.fsdecode(n): _decoded(now.get(n)) for n in names if now.get(n) != before.get(n)}

    def _set_environment(self, new: dict[str, str | None]) -> None:
        wanted = {**self._environment, **{os.fsencode(name): value for name, value in new.items()}}
        for name in {*wanted, *_VARIABLES} - _OF_WORKERS:
            if (value := _decoded(wanted.get(name))) is None:
                os.environ.pop(os.fsdecode(name), None)
            elif _decoded(_VARIABLES.get(name)) != value:
                os.environ[os.fsdecode(name)] = value


def _decoded(value: bytes | str | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _decimal_context() -> list[Any]:
    """All but the flags, which calculations set and few scripts read; as the context is pickled, the fastest way."""
    _, (*values, _, traps) = decimal.getcontext().__reduce__()
    return [*values, traps]


def _decimal_values(seen: list[Any]) -> list[Any]:
    *values, traps = seen
    return [*values, sorted(kind.__name__ for kind in traps)]


def _set_decimal_context(values: list[Any]) -> None:
    now = decimal.getcontext()
    now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps = values
    for kind in now.traps:
        now.traps[kind] = kind.__name__ in traps


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _numpy_token(module: str, name: str) -> Any:
    """The object that holds NumPy's settings in this thread: to set one makes another. None: NumPy shows none."""
    variable = getattr(sys.modules.get(module), name, None)
    return _held_by(variable) if isinstance(variable, contextvars.ContextVar) else None


_errors_token = functools.partial(_numpy_token, "numpy._core.umath", "_extobj_contextvar")
_printing_token = functools.partial(_numpy_token, "numpy._core.printoptions", "format_options")


def _set_numpy_errors(values: dict[str, str] | None) -> None:
    if values is not None:
        importlib.import_module("numpy").seterr(**values)


def _numpy_printing() -> dict[str, Any] | None:
    """Less functions of the script's."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else {k: v for k, v in numpy.get_printoptions().items() if k not in _NUMPY_FUNCTIONS}


def _set_numpy_printing(values: dict[str, Any] | None) -> None:
    if values is not None:
        numpy = importlib.import_module("numpy")
        now = numpy.get_printoptions()
        numpy.set_printoptions(**values, **{name: now[name] for name in _NUMPY_FUNCTIONS if name in now})


# --- contents of objects ------------------------------------------------------------------------------------------
class _TooLarge:
    """A database with more bytes than are carried: it matters whether it was changed."""


@functools.cache
def _too_large(*_: Any) -> _TooLarge:
    return _TooLarge()


def contents_of(value: Any) -> Spot | None:
    """Contents: what a context variable, or an SQLite database in memory, holds. None: of another object."""
    if isinstance(value, contextvars.ContextVar):
        return FunctionSpot(functools.partial(_held_by, value), value.set)
    sqlite = sys.modules.get("sqlite3")
    if sqlite is not None and isinstance(value, sqlite.Connection) and _is_in_memory(value, sqlite.Error):
        return FunctionSpot(functools.partial(_database_in, value), functools.partial(_fill_database, value))
    return None


def _held_by(variable: contextvars.ContextVar[Any]) -> Any:
    """Its value, or its default. MISSING: nothing, and nothing can make it so again once it was set."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _database_in(connection: Any) -> Any:
    """All pages of a database, less its counts of changes, of which a copy has others. Empty: it holds nothing."""
    ((count,),), ((size,),), ((schema,),) = (
        _rows(connection, f"PRAGMA {name}") for name in ("page_count", "page_size", "schema_version")
    )
    if not count:
        return b""
    if count * size > _MOST_BYTES:
        return _too_large(id(connection), count, schema, connection.total_changes, connection.in_transaction)
    pages = bytearray(connection.serialize())
    for first in _COUNTS:
        pages[first : first + 4] = bytes(4)
    return bytes(pages)


def _rows(connection: Any, request: str) -> list[Any]:
    """Return the rows as tuples, whatever the script makes of rows."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return list(cursor.execute(request))


def _fill_database(connection: Any, pages: Any) -> None:
    """Give a database these pages. `deserialize` would make it one that does not show what is not committed yet.

    A database of which a cursor has rows to give stays as it is; `Undo` sees that.
    """
    if isinstance(pages, _TooLarge):
        return
    sqlite = sys.modules["sqlite3"]
    with contextlib.closing(sqlite.connect(":memory:")) as other:
        if pages:
            other.deserialize(pages)
        with contextlib.suppress(sqlite.OperationalError):
            connection.rollback()
            other.backup(connection)


def _is_in_memory(connection: Any, error: type[Exception]) -> bool:
    try:
        files = [file for _, _, file in _rows(connection, "PRAGMA database_list")]
    except error:  # it was closed, or belongs to another thread
        return False
    return not any(files)
