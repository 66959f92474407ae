"""Models in words."""

import pytest

from relight.errors import UsageError
from relight.transfer.plan.model_spec import EXAMPLES, describe_model


def test_a_dense_model_has_the_size_that_is_known() -> None:
    """Llama 3 8B: 8,030,261,248 parameters, 291 tensors."""
    manifest = describe_model(EXAMPLES[0])
    assert manifest.total_bytes == 2 * 8_030_261_248
    assert len(manifest.entries) == 291
    shapes = {entry.name: entry.shape for entry in manifest.entries}
    assert shapes["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (4096, 14336)


def test_a_mixture_of_experts_has_each_of_them() -> None:
    manifest = describe_model("moe:layers=2,hidden=8,ffn=16,vocab=100,experts=3,dtype=float32")
    layer = 2 * 8 + 4 * 8 * 8 + 3 * 8 + 3 * 3 * 8 * 16
    assert manifest.total_bytes == 4 * (2 * layer + 2 * 100 * 8 + 8)
    names = [entry.name for entry in manifest.entries]
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" in names


def test_spaces_do_no_harm() -> None:
    assert describe_model("dense: layers=1, hidden=8, ffn = 8, vocab=9") == describe_model(
        "dense:layers=1,hidden=8,ffn=8,vocab=9,dtype=bfloat16"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "dense:... or moe:..."),
        ("tiny", "dense:... or moe:..."),
        ("dense:", "each part is NAME=VALUE"),
        ("dense:layers", "each part is NAME=VALUE"),
        ("dense:layers=1,layers=2", "each name comes once"),
        ("dense:layers=1,hidden=8", "lacks ffn, vocab; for example dense:"),
        ("moe:layers=1,hidden=8,ffn=8,vocab=9", "lacks experts; for example moe:"),
        ("dense:layers=1,hidden=8,ffn=8,vocab=9,experts=2", "a dense model has no 'experts'"),
        ("dense:layers=1,hidden=8,ffn=8,vocab=9,dtype=float3", "no tensors of type 'float3'"),
        ("dense:layers=0,hidden=8,ffn=8,vocab=9", "layers=0 in"),
        ("dense:layers=-1,hidden=8,ffn=8,vocab=9", "layers=-1 in"),
        ("dense:layers=1e3,hidden=8,ffn=8,vocab=9", "layers=1e3 in"),
        ("dense:layers=²,hidden=8,ffn=8,vocab=9", "layers=² in"),
        ("moe:layers=999999999,hidden=8,ffn=8,vocab=9,experts=999999999", "more than 500000 tensors"),
    ],
)
def test_what_describes_no_model(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        describe_model(text)
    assert "\n" not in str(caught.value)
