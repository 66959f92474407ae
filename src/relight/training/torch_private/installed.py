"""The installed torch, held against the tested releases and the private interfaces that relight needs."""

import importlib
from functools import reduce

import torch

from relight.errors import MissingInterfaceError

TESTED = ("2.13", "2.14")  # releases on which `make test-versions` has passed: benchmarks/results/versions.md

# Without these no job is right. What single features need (FSDP2, pipelines, ZeRO) is looked up when they are used.
NEEDED = {
    "torch": (
        "Tensor._version",
        "_C.TensorBase.data",
        "_C.TensorBase.requires_grad_",
        "utils._pytree.tree_leaves",
        "_C._current_graph_task_id",
        "_C._jit_set_profiling_executor",
        "autograd.Variable._execution_engine.queue_callback",
        "autograd.graph._engine_run_backward",
        "autograd._engine_run_backward",
        "_C._dynamo.eval_frame",
        "amp.GradScaler",
    ),
    "torch._C._distributed_c10d": (
        "FakeProcessGroup._create_internal",
        "HashStore",
        "PrefixStore",
        "ProcessGroupGloo.create_device",
        "_register_comm_hook",
    ),
    "torch.distributed": (
        "ProcessGroup._get_backend",
        "ProcessGroup._register_backend",
        "ProcessGroup._set_default_backend",
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


def missing() -> list[str]:
    """The needed interfaces that the installed torch does not have, by their full names."""
    absent = []
    for home, names in NEEDED.items():
        try:
            module = importlib.import_module(home)
        except ImportError:
            absent.append(home)
            continue
        for name in names:
            try:
                reduce(getattr, name.split("."), module)
            except (AttributeError, NameError):  # a property may fail for what is missing beneath it
                absent.append(f"{home}.{name}")
    return absent


def refuse_missing() -> None:
    """Raise MissingInterfaceError, with their names, if private interfaces are missing."""
    if absent := missing():
        raise MissingInterfaceError(
            f"torch {torch.__version__} lacks {', '.join(absent)}, which relight needs: install torch {TESTED[-1]}"
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
