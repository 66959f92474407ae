"""Only `torch_private` touches private names of torch; the check that says so finds each way to do it."""

import ast

import pytest

from checks.torch_names import main, names_defined, violations


def found_in(source: str) -> list[str]:
    tree = ast.parse(source)
    return [what for _, what in violations(tree, frozenset(names_defined(tree)))]


def test_only_torch_private_touches_private_names_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C._distributed_c10d import Store",
        "from torch.utils.data.dataloader import _BaseDataLoaderIter",
        "import torch._dynamo",
        "import torch\nleaves = torch.utils._pytree.tree_leaves([])",
        "import torch.distributed as dist\ndist._world = None",
        "def versions(tensor): return tensor._version",
        "def parameters(module): return module._parameters",
        "import torch\ndef name(group): return getattr(group, '_name')",
        "import torch\nTABLES = ('_post_accumulate_grad_hooks',)",
        "import torch\nclass Own(torch.nn.Module):\n    def forward(self): return self._call_impl()",
    ],
)
def test_a_private_name_of_torch_is_found(source: str) -> None:
    assert found_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nclass Own:\n    def __init__(self): self._mine = torch.zeros(1)",
        "import torch\nclass Own:\n    _mine = 0\n    def like(self, other): return other._mine",
        "import sys\nimport torch\nframe = sys._getframe(1)",
        "import torch\nname = f'{torch.uint8}_words'",
    ],
)
def test_names_of_ones_own_are_left_alone(source: str) -> None:
    assert found_in(source) == []
