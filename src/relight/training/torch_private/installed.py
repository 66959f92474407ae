"""The installed torch, held against the tested releases and the private interfaces that relight needs."""

import functools
import importlib
from collections.abc import Iterator, Mapping
from functools import reduce
from types import CodeType
from typing import Any

import torch

from relight.errors import MissingInterfaceError

TESTED = ("2.13", "2.14")  # releases on which `make test-versions` has passed: benchmarks/results/versions.md

# Without these no job is right.
NEEDED = {
    "torch": (
        "Tensor._version",
        "_foreach_copy_",
        "_C.TensorBase.data",
        "_C.TensorBase.requires_grad_",
        "utils._pytree.tree_leaves",
        "_C._current_graph_task_id",
        "_C._jit_set_profiling_executor",
        "_C._disabled_torch_dispatch_impl",
        "_C._get_dispatch_stack_at",
        "_C._get_function_stack_at",
        "_C._len_torch_dispatch_stack",
        "_C._len_torch_function_stack",
        "_C._pop_torch_function_stack",
        "_C._push_on_torch_function_stack",
        "_GLOBAL_DEVICE_CONTEXT",
        "utils._python_dispatch._pop_mode",
        "utils._python_dispatch._push_mode",
        "_C._storage_Use_Count",
        "_C.TensorBase._indices",
        "_C.TensorBase._post_accumulate_grad_hooks",
        "_C.TensorBase._values",
        "UntypedStorage._cdata",
        "utils._pytree.tree_map",
        "autograd.Variable._execution_engine.queue_callback",
        "autograd.graph._engine_run_backward",
        "autograd._engine_run_backward",
        "_C._dynamo.eval_frame",
        "_C._functorch.peek_interpreter_stack",
        "_C._functorch.CInterpreter",
        "amp.GradScaler",
        "_tensor_str.PRINT_OPTS",
    ),
    "torch.utils._device": ("DeviceContext",),
    "torch._C._distributed_c10d": (
        "FakeProcessGroup._create_internal",
        "HashStore",
        "PrefixStore",
        "ProcessGroupGloo._Options",
        "ProcessGroupGloo._set_default_timeout",
        "ProcessGroupGloo.create_device",
        "Reducer._remove_autograd_hooks",
        "Reducer._reset_state",
        "Reducer._set_mixed_precision_param_dtype",
        "_register_comm_hook",
    ),
    "torch.distributed": (
        "ProcessGroup._get_backend",
        "ProcessGroup._register_backend",
        "ProcessGroup._set_default_backend",
        "ProcessGroup._set_group_desc",
        "ProcessGroup._set_group_name",
        "_compute_bucket_assignment_by_size",
    ),
    "torch.distributed.device_mesh": ("DeviceMesh._get_root_mesh",),
    "torch.distributed.distributed_c10d": (
        "GroupMember.WORLD",
        "_process_group_name",
        "_warn_not_in_group",
        "_world",
        "broadcast_object_list",
        "gather_object",
        "monitored_barrier",
        "recv_object_list",
        "scatter_object_list",
    ),
    "torch.distributed._composable_state": ("_get_module_state",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.utils.data._utils.fetch": ("_IterableDatasetFetcher.fetch", "_MapDatasetFetcher.fetch"),
    "torch.utils.data.dataloader": ("_BaseDataLoaderIter._next_index", "_BaseDataLoaderIter._reset"),
    "torch.nn.parallel": (
        "DistributedDataParallel._build_debug_param_to_name_mapping",
        "DistributedDataParallel._build_params_for_reducer",
        "DistributedDataParallel._ddp_init_helper",
        "DistributedDataParallel._get_ddp_logging_data",
        "DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
        "DistributedDataParallel._set_static_graph",
        "DistributedDataParallel._sync_buffers",
    ),
}

# Attributes that the classes of these modules give their objects; "a|b": one release has this name, another that one.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.amp.grad_scaler": ("_per_optimizer_states",),
    "torch.distributed.device_mesh": ("_coordinate_on_dim", "_layout", "_rank", "_rank_map"),
    "torch.nn.modules.module": (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_modules",
        "_parameters",
    ),
    "torch.nn.parallel.distributed": ("_comm_hooks", "_has_rebuilt_buckets", "_module_parameters", "reducer"),
    "torch.nn.utils.prune": ("_tensor_name",),
    "torch.optim.optimizer": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "torch.utils.data._utils.worker": ("_ResumeIteration",),
    "torch.utils.data.dataloader": (
        "_auto_collation",
        "_get_iterator",
        "_index_queues",
        "_index_sampler",
        "_iterator",
        "_num_workers",
        "_worker_queue_idx_cycle",
    ),
}
_FSDP = "torch.distributed.fsdp._fully_shard"
# The same of features that not every script uses: looked for when such an object is handed over.
FEATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "FSDP2": {
        f"{_FSDP}._fsdp_state": (
            *("_comm_ctx", "_state_ctx", "_training_state", "_fsdp_param_group|_fsdp_param_groups"),
            *("iter_forward_root", "post_backward_final_callback_queued"),
        ),
        f"{_FSDP}._fsdp_param_group": (
            *("_post_forward_indices", "_to_sharded", "_training_state"),
            *("fsdp_params", "mesh_info", "post_forward_mesh_info", "post_forward_order"),
        ),
        f"{_FSDP}._fsdp_param": (
            *("_orig_size", "_sharded_param_data", "_unsharded_param", "sharded_param", "sharded_size"),
            *("fsdp_placement", "mesh_info", "post_forward_mesh_info", "unsharded_accumulated_grad"),
            *("contiguous_sharded_stride", "padded_sharded_param_size"),
        ),
        "torch.distributed.tensor._api": ("_local_tensor",),
    },
    "pipelining": {
        "torch.distributed.pipelining.schedules": ("_internal_losses", "_stage", "_stages"),
        "torch.distributed.pipelining.stage": (
            *("_PipelineStageBase", "fwd_cache", "bwd_cache", "backward_state", "dw_runner", "output_chunks"),
            *("args_recv_info", "grad_recv_info", "act_send_info", "grad_send_info", "submod"),
        ),
    },
    "ZeroRedundancyOptimizer": {
        "torch.distributed.optim.zero_redundancy_optimizer": (
            *("_init_local_optimizer", "_overlap_with_ddp", "_partition_parameters", "_sync_params"),
            *("global_rank", "optim", "process_group", "rank"),
        ),
    },
    "DTensor": {
        "torch.distributed.tensor._api": ("_local_tensor", "_spec"),
        "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    },
}


def missing() -> list[str]:
    """The needed interfaces that the installed torch does not have, by their full names."""
    return [*_missing_names(), *_missing_attributes(ATTRIBUTES)]


def _missing_names() -> Iterator[str]:
    for home, names in NEEDED.items():
        try:
            module = importlib.import_module(home)
        except ImportError:
            yield home
            continue
        for name in names:
            try:
                reduce(getattr, name.split("."), module)
            except (AttributeError, NameError):  # a property may fail for what is missing beneath it
                yield f"{home}.{name}"


def _missing_attributes(needed: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the attributes that no code of their module names: an object would be needed to ask for them."""
    for home, names in needed.items():
        try:
            code = code_of(home)
        except ImportError:
            yield home
            continue
        present = set(_names_in(code))
        yield from (f"{home}.{name}" for name in names if present.isdisjoint(name.split("|")))


def code_of(home: str) -> CodeType:
    """Return the code of a module. Raises ImportError if there is no such module."""
    loader: Any = getattr(importlib.import_module(home).__spec__, "loader", None)
    code: CodeType | None = loader.get_code(home) if hasattr(loader, "get_code") else None
    if code is None:
        raise ImportError(f"{home} has no code")
    return code


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads and sets, and its constants, among which are names of slots and fields."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (each for each in constant if isinstance(each, str))


def refuse_missing() -> None:
    """Raise MissingInterfaceError, with their names, if private interfaces are missing."""
    _refuse(missing(), "relight")


@functools.cache
def refuse_missing_of(feature: str) -> None:
    """Raise MissingInterfaceError, with their names, if private interfaces of one of the FEATURES are missing."""
    _refuse(list(_missing_attributes(FEATURES[feature])), f"relight, for {feature},")


def _refuse(absent: list[str], user: str) -> None:
    if absent:
        raise MissingInterfaceError(
            f"torch {torch.__version__} lacks {', '.join(absent)}, which {user} needs: install torch {TESTED[-1]}"
        )


def describe_installed() -> str:
    """Return what to tell the user about the installed version; empty if it is a tested one."""
    if is_tested(torch.__version__):
        return ""
    return (
        f"torch {torch.__version__} is installed; relight was tested with {', '.join(TESTED)}. Its private interfaces "
        "are there. Compare the digests of a disturbed and an undisturbed run before you rely on it (relight prove)"
    )


def is_tested(version: str) -> bool:
    """Return whether a version is of a tested release, in any build."""
    return ".".join(version.split(".")[:2]) in TESTED
