"""A model in words to a manifest: names and shapes of a Llama-like one, without its weights. Pure, without torch."""

from collections.abc import Iterator, Mapping

from relight.errors import UsageError
from relight.transfer.plan.manifest import ITEM_BYTES, Entry, Manifest, make_manifest

EXAMPLES = (
    "dense:layers=32,hidden=4096,ffn=14336,vocab=128256,kv=1024,dtype=bfloat16",
    "moe:layers=24,hidden=2048,ffn=1408,vocab=151936,experts=60,dtype=bfloat16",
)
MAX_TENSORS = 500_000
_NEEDED = ("layers", "hidden", "ffn", "vocab")


def describe_model(text: str) -> Manifest:
    """The manifest of `dense:layers=..,hidden=..,ffn=..,vocab=..`, or of `moe:` with `experts=..` as well.

    `kv`: rows of the key and value projections, by default as many as `hidden`; `dtype`: by default bfloat16. A
    mixture of experts has `experts` feed-forward parts of `ffn` rows in each layer. Raises UsageError.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("dense", "moe"):
        raise UsageError(f"a model is described by dense:... or moe:..., not {text!r}; for example {EXAMPLES[0]}")
    words: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in words:
            raise UsageError(f"{part!r} in {text!r}: each part is NAME=VALUE, and each name comes once")
        words[name] = value
    dtype = words.pop("dtype", "bfloat16")
    if dtype not in ITEM_BYTES:
        raise UsageError(f"{text!r}: relight moves no tensors of type {dtype!r}")
    needed = (*_NEEDED, "experts") if kind == "moe" else _NEEDED
    missing = [name for name in needed if name not in words]
    if missing:
        raise UsageError(f"{text!r} lacks {', '.join(missing)}; for example {EXAMPLES[kind == 'moe']}")
    unknown = [name for name in words if name not in (*needed, "kv")]
    if unknown:
        raise UsageError(f"{text!r}: a {kind} model has no {unknown[0]!r}, but {', '.join((*needed, 'kv', 'dtype'))}")
    sizes = {name: _size(text, name, value) for name, value in words.items()}
    sizes.setdefault("kv", sizes["hidden"])
    if sizes["layers"] * (9 + 3 * sizes.get("experts", 1)) > MAX_TENSORS:
        raise UsageError(f"{text!r} has more than {MAX_TENSORS} tensors")
    return make_manifest(Entry(name, dtype, shape) for name, shape in _tensors(sizes))


def _size(text: str, name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) > 0):
        raise UsageError(f"{name}={value} in {text!r}: a whole number from 1 to 999999999 is needed")
    return int(value)


def _tensors(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, kv = sizes["hidden"], sizes["ffn"], sizes["kv"]
    yield "model.embed_tokens.weight", (sizes["vocab"], hidden)
    for number in range(sizes["layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        parts = [f"{layer}.mlp"]
        if "experts" in sizes:
            yield f"{layer}.mlp.gate.weight", (sizes["experts"], hidden)
            parts = [f"{layer}.mlp.experts.{expert}" for expert in range(sizes["experts"])]
        for part in parts:
            yield f"{part}.gate_proj.weight", (ffn, hidden)
            yield f"{part}.up_proj.weight", (ffn, hidden)
            yield f"{part}.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes["vocab"], hidden)
