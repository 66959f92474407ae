"""For `relight prove`: digests of the state after each step, on each rank, and the script's own variables.

Off in any other job. Nothing here changes what the script computes.
"""

import collections
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import xxhash
from torch import nn

from relight.script_files import is_script_file
from relight.training.process.runtime import Runtime
from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.tracked import TrackedState
from relight.training.worker.proof.tracing import OperationTrace
from relight.transfer.io.codec import host_copy, local_part, raw_bytes
from relight.wire.records.evidence import StepEvidence, encode_step, evidence_path

_HOME = str(Path(__file__).parents[2]) + os.sep
_SHOWN_CHARACTERS = 60
_DEPTH = 3  # of containers
_MEMBERS = 256
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Evidence:
    """Writes down the state at the end of each step; the loop calls `begin` and `commit`."""

    def __init__(self, run_dir: str, process: str, state: TrackedState, traced_step: int) -> None:
        """`traced_step`: of this one every operation is written down; -1: of none."""
        path = evidence_path(run_dir, process)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._process = process
        self._state = state
        self._traced_step = traced_step
        self._names: dict[str, str] = {}
        self._trace: OperationTrace | None = None
        self._traces = False  # it is installed

    def begin(self, step: int) -> None:
        """An attempt at a step begins: what do the script's variables hold?"""
        self._names = names_of(_caller())
        if step == self._traced_step:
            self._trace = OperationTrace(_digest, _HOME)
            self._trace.__enter__()  # type: ignore[no-untyped-call]
            self._traces = True

    def end(self) -> None:
        """The attempt is over, committed or not."""
        if self._trace is not None and self._traces:
            self._traces = False
            self._trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def commit(self, step: int, rank: int, generation: int, attempt: int) -> None:
        """Write down what is there now. At once: the process may be killed in the next moment."""
        trace, self._trace = self._trace, None
        line = StepEvidence(
            step=step,
            rank=rank,
            process=self._process,
            generation=generation,
            attempt=attempt,
            state=dict(_state_of(self._state)),
            flags=dict(_flags_of(self._state.modules)),
            names=self._names,
            operations=tuple(trace.operations) if trace is not None else (),
        )
        os.write(self._file, encode_step(line))


def begin_evidence(runtime: Runtime, state: TrackedState) -> Evidence | None:
    """None in a job that is no experiment."""
    settings = runtime.settings
    if not settings.evidence:
        return None
    return Evidence(settings.run_dir, runtime.process, state, settings.traced_step)


# --- what training changes ------------------------------------------------------------------------------------------
def _state_of(state: TrackedState) -> Iterator[tuple[str, str]]:
    for owner, module in state.modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{owner}.{name}", _digest(tensor)
    tree = state.replica.flat()
    for path, tensor in zip(tree.paths, tree.tensors, strict=True):
        if not path.startswith("modules."):
            yield path, _digest(tensor)
    for name, optimizer in state.optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, _PLAIN):
                    yield f"optimizers.{name}.groups[{index}].{key}", _shown(value)
    for name, thing in {**state.objects, **state.per_rank}.items():
        yield from _leaves(own_state_dict(thing), f"objects.{name}")


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, _shown(tree)


def _flags_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for owner, handed in modules.items():
        for name, module in handed.named_modules():
            own = f"{owner}.{name}" if name else owner
            yield f"{own}.training", str(module.training)
            for key, value in vars(module).items():
                if key != "training" and not key.startswith("_") and isinstance(value, (*_PLAIN, torch.Tensor)):
                    yield f"{own}.{key}", _shown(value)
        for name, parameter in handed.named_parameters():
            yield f"{owner}.{name}.requires_grad", str(parameter.requires_grad)


# --- what the script carries by itself ------------------------------------------------------------------------------
def names_of(frame: FrameType | None) -> dict[str, str]:
    """Variables of the function that has the loop, of its script, and of modules beside that, with plain values."""
    if frame is None:
        return {}
    found: dict[str, str] = {}
    scopes: list[tuple[str, Mapping[str, Any]]] = [("", frame.f_globals)]
    if frame.f_locals is not frame.f_globals:
        scopes.append(("", frame.f_locals))
    home = os.path.dirname(os.path.abspath(frame.f_code.co_filename)) + os.sep
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        beside = isinstance(path, str) and os.path.abspath(path).startswith(home) and is_script_file(path)
        if beside and vars(module) is not frame.f_globals:
            scopes.append((f"{name}.", vars(module)))
    for prefix, scope in scopes:
        for name, value in list(scope.items()):
            if not name.startswith("__"):
                found.update((f"{prefix}{key}", shown) for key, shown in _named(name, value))
    return found


def _named(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if _is_plain(value):
        yield name, _shown(value)
        return
    if isinstance(value, (type, ModuleType, nn.Module, torch.optim.Optimizer)) or callable(value):
        yield from _of_function(name, value)
        return
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names | {"torch", "relight", "numpy"}:
        return
    for key, attribute in list(getattr(value, "__dict__", {}).items()):
        if _is_plain(attribute):
            yield f"{name}.{key}", _shown(attribute)


def _of_function(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Values that a function of the script keeps: attributes of its own, and variables that it closes over."""
    if isinstance(value, type):
        for key, attribute in list(vars(value).items()):
            if not key.startswith("__") and _is_plain(attribute):
                yield f"{name}.{key}", _shown(attribute)
        return
    code = getattr(value, "__code__", None)
    if code is None:
        return
    for key, attribute in list(vars(value).items()):
        if _is_plain(attribute):
            yield f"{name}.{key}", _shown(attribute)
    arguments = code.co_varnames[: code.co_argcount]
    kept = dict(zip(arguments[::-1], (value.__defaults__ or ())[::-1], strict=False))
    for key, default in {**kept, **(value.__kwdefaults__ or {})}.items():
        if isinstance(default, (list, dict, set, torch.Tensor)) and _is_plain(default):
            yield f"{key} (of {name})", _shown(default)
    for key, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # it holds nothing yet
            continue
        if _is_plain(held):
            yield f"{key} (of {name})", _shown(held)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (*_PLAIN, torch.Tensor)) or type(value).__module__ == "numpy":
        return True
    if not isinstance(value, (list, tuple, set, frozenset, dict, collections.deque)) or depth >= _DEPTH:
        return False
    members = list(value.values()) if isinstance(value, dict) else list(value)
    return len(members) <= _MEMBERS and all(_is_plain(member, depth + 1) for member in members)


def _shown(value: Any) -> str:
    """The value in words if it is short; else its digest."""
    if isinstance(value, torch.Tensor):
        return f"{value.item()!r}" if value.numel() == 1 and _is_here(value) else f"tensor {_digest(value)}"
    if isinstance(value, (list, tuple, collections.deque)) and not isinstance(value, str):
        text = f"{type(value).__name__}[{', '.join(_shown(member) for member in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key!r}: {_shown(member)}' for key, member in value.items())}}}"
    else:
        text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS // 2]}... ({xxhash.xxh3_64_hexdigest(text.encode())})"


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not hasattr(tensor, "to_local")


def _digest(tensor: torch.Tensor) -> str:
    own = local_part(tensor)
    if own.layout is not torch.strided or own.device.type == "meta":
        return str(own.shape)
    plain = host_copy(own)
    hashed = xxhash.xxh3_64(f"{plain.dtype}{list(plain.shape)}".encode())
    hashed.update(raw_bytes(plain))
    return hashed.hexdigest()


def _caller() -> FrameType | None:
    """The innermost frame that is not relight's: the one with the loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return frame
