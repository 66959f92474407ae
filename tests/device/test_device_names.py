"""`make check` finds names of devices outside the room that may have them."""

import ast

import pytest

from checks.device_names import main, names_device, violations


@pytest.mark.parametrize(
    "text", ["cuda", "cuda:0", "is_cuda", "ProcessGroupNCCL", "CUDA_VISIBLE_DEVICES", "hip_stream"]
)
def test_a_device_is_recognized(text: str) -> None:
    assert names_device(text)


@pytest.mark.parametrize("text", ["input", "device", "ship", "barracuda", "accelerator"])
def test_other_words_are_not(text: str) -> None:
    assert not names_device(text)


def test_code_may_not_name_a_device_but_a_sentence_may() -> None:
    code = 'import torch\nif tensor.is_cuda:\n    torch.cuda.synchronize()\nplace = "cuda:0"\nsay("no NCCL here")\n'
    assert [line for line, _ in violations(ast.parse(code))] == [2, 4, 3]


def test_the_source_keeps_the_rule() -> None:
    assert main() == 0
