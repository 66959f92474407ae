"""Check that only `torch_private` touches names of torch that begin with an underscore.

    python -m checks.torch_names

Everything private of torch lives in `training/torch_private` (and in files of that name elsewhere), so that a new
version of torch is read against one room. The check reads syntax trees, without importing anything: it reports imports
from private modules of torch, dotted names that begin at torch, underscore attributes of other objects which no file of
relight defines, and such names as strings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "relight"
ROOMS = (
    "device",
    "training",
    "transfer",
    "integrations",
)  # the others may not import torch (contracts in pyproject.toml)
HOME = "torch_private"  # a folder, or a file of that name
# Underscore names of other libraries, by their last part.
NOT_TORCH = {
    "_average_model": "Lightning",
    "_build_kwargs": "Lightning",
    "_build_metric_logger": "torchtitan",
    "_call_callback_hooks": "Lightning",
    "_call_lightning_module_hook": "Lightning",
    "_call_strategy_hook": "Lightning",
    "_callback": "multiprocessing.util.Finalize",
    "_callback_metrics": "Lightning",
    "_checkpoint_connector": "Lightning",
    "_clip_grad_norm": "transformers.Trainer",
    "_combined_loader": "Lightning",
    "_computed": "torchmetrics",
    "_config": "multiprocessing.process",
    "_current_fx": "Lightning",
    "_current_fx_name": "Lightning",
    "_data_fetcher": "Lightning",
    "_dataloader": "Fabric's loader",
    "_evaluate": "transformers.Trainer",
    "_exit": "os",
    "_exit_callbacks": "contextlib.ExitStack",
    "_fields": "named tuples",
    "_finalize_training": "transformers.Trainer",
    "_finalizer_registry": "multiprocessing.util",
    "_first_loop_iter": "Lightning",
    "_forward_cache": "torchmetrics",
    "_get_grad_norm": "transformers.Trainer",
    "_get_learning_rate": "transformers.Trainer",
    "_current_frames": "sys",
    "_getframe": "sys",
    "_globalstep_last_logged": "transformers.Trainer",
    "_init_training_state": "transformers.Trainer",
    "_initial_global_step": "transformers.Trainer",
    "_initial_num_input_tokens_seen": "transformers.Trainer",
    "_inst": "random",
    "_io": "a module of Python",
    "_last_val_time": "Lightning",
    "_logged_metrics": "Lightning",
    "_logger_connector": "Lightning",
    "_make_closure": "Lightning",
    "_maybe_log_save_evaluate": "transformers.Trainer",
    "_member_map_": "enum",
    "_metric_attributes": "Lightning",
    "_name_": "enum",
    "_num_iter_calls": "Lightning",
    "_num_ready_batches_reached": "Lightning",
    "_on_before_batch_transfer": "Lightning",
    "_owner": "torchtitan",
    "_per_second": "suffixes of transformers' measurements",
    "_prepare_for_training": "transformers.Trainer",
    "_progress_bar_metrics": "Lightning",
    "_rand": "numpy.random",
    "_registry": "vLLM's WeightTransferEngineFactory",
    "_restarting": "Lightning",
    "_result": "Lightning",
    "_results": "Lightning",
    "_run_epoch": "transformers.Trainer",
    "_sampler": "Lightning",
    "_seen_batches_per_dataloader": "Lightning",
    "_set_sync_gradients": "accelerate",
    "_shared_state": "accelerate",
    "_should_check_val_fx": "Lightning",
    "_skip_next_val": "Lightning",
    "_sort_order_": "enum",
    "_total_loss_scalar": "transformers.Trainer",
    "_tr_loss": "transformers.Trainer",
    "_track_num_input_tokens": "transformers.Trainer",
    "_trainer": "Lightning",
    "_update_count": "torchmetrics",
    "_val_check_time_interval": "Lightning",
    "_wrap_closure": "Lightning",
}
# Attributes of torch's objects that classes of relight have as well: of an object other than `self` they are torch's.
TORCH = frozenset({"_buffers", "_modules", "_parameters", "_stages", "_version"})
_PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*")


def main() -> int:
    """Print each violation; return 1 if there is one."""
    paths = (path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py")))
    files = {path: ast.parse(path.read_text()) for path in paths}
    defined = frozenset(name for tree in files.values() for name in names_defined(tree))
    found = [
        f"{path.relative_to(SOURCE.parents[1])}:{line}: {what}"
        for path, tree in files.items()
        if not is_home(path)
        for line, what in violations(tree, defined)
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


def is_home(path: Path) -> bool:
    """Return whether private names of torch may stand in this file."""
    return HOME in (*path.parts, path.stem)


def names_defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, fields, and attributes of `self` that a file defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
            case ast.Name(name, ast.Store()):
                yield name


def violations(tree: ast.AST, defined: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and description of each private name of torch in a file. `defined`: names of relight's own."""
    from_torch = set(_names_from_torch(tree))
    defined_here = set(names_defined(tree)) - TORCH
    formats = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    in_formats = {id(value) for node in formats for value in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _is_torch(module):
                private = [alias.name for alias in names if _is_private(alias.name)]
                if private or any(map(_is_private, module.split("."))):
                    yield node.lineno, f"from {module} import {', '.join(alias.name for alias in names)}"
            case ast.Import(names=names):
                for alias in names:
                    if _is_torch(alias.name) and any(map(_is_private, alias.name.split("."))):
                        yield node.lineno, f"import {alias.name}"
            case ast.Attribute(value=owner, attr=name) if _is_private(name) and name not in NOT_TORCH:
                own = defined if isinstance(owner, ast.Name) and owner.id in ("self", "cls") else defined_here
                if name not in own or _root(node) in from_torch:
                    yield node.lineno, ast.unparse(node)
            case ast.Constant(str(name)) if _is_private(name) and name not in {*NOT_TORCH, *defined}:
                if id(node) not in in_formats and from_torch:
                    yield node.lineno, repr(name)


def _names_from_torch(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _is_torch(module):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Import(names=names):
                yield from (alias.asname or "torch" for alias in names if _is_torch(alias.name))


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torchdata")


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
