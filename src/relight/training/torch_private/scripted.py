"""Functions compiled by torch.jit.script: the same code from the first call on."""

import torch


def optimize_from_the_first_call() -> None:
    """Turn off the executor of torch.jit that watches a function's first calls, and changes its code after these.

    A process that has called a function less often would compute other bits than its peers. The executor chosen
    here computes from the first call on what the other one computes after it has watched.
    """
    torch._C._jit_set_profiling_executor(False)
