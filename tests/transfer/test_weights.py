"""Tensors to buckets and back, bit for bit: every type, every layout, through buffers of any size."""

import ctypes
import io
import mmap
import random
import threading
from collections.abc import Mapping

import pytest
import torch
import xxhash

from relight.errors import TransferError, UsageError
from relight.transfer.plan.manifest import ITEM_BYTES, Entry
from relight.transfer.plan.plan import plan_buckets
from relight.transfer.tensors.device_staging import DeviceStaging
from relight.transfer.tensors.populate import is_memory_plentiful
from relight.transfer.tensors.staging import Staging
from relight.transfer.tensors.targets import StagedTensors
from relight.transfer.tensors.weights import TensorSource, allocate, describe, digest_weights, plain_name, weights_of
from tests.transfer.hosts import PATIENCE

DTYPES = sorted(ITEM_BYTES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def noise(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, whatever they mean: also NaNs of every kind; a bool is 0 or 1."""
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if tensor.numel():
        data = random.Random(f"{dtype} {shape} {seed}").randbytes(tensor.numel() * tensor.element_size())
        bits = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8)[:] = bits & 1 if dtype == "bool" else bits
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def move(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int, staging: Staging | DeviceStaging | None = None
) -> Staging | DeviceStaging:
    """Through one buffer, bucket by bucket, each verified; every second tensor without a buffer, to a twin, as well.

    And through another one as weights on a device are moved.
    """
    source = TensorSource(tensors)
    twins = {index: allocate(entry) for index, entry in enumerate(source.manifest.entries) if index % 2 == 0}
    addresses = {index: twin.data_ptr() for index, twin in twins.items()}
    staging = staging or Staging(source.manifest)
    beside = DeviceStaging(source.manifest, tensors)
    buffer, other = memoryview(bytearray(bucket_bytes)), memoryview(bytearray(b"x" * bucket_bytes))
    for bucket in plan_buckets(source.manifest, bucket_bytes):
        digest = source.fill(bucket, buffer)
        lifted = xxhash.xxh3_64()
        source._write_from_device(bucket, other, lifted.update)
        assert lifted.intdigest() == digest
        assert other[: bucket.nbytes] == buffer[: bucket.nbytes]
        assert beside.load(bucket, other) == digest
        assert source.digest(bucket) == digest
        assert source.copy(bucket, addresses) == digest
        assert staging.load(bucket, buffer) == digest
    for index, tensor in enumerate(tensors.values()):
        if index in twins and not source.manifest.entries[index].same_as:
            assert bits(twins[index]) == bits(tensor)
    assert digest_weights(beside.tensors) == digest_weights(tensors)
    return staging


def assert_arrives(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> None:
    arrived = move(tensors, bucket_bytes).tensors
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(arrived[name]) == bits(tensor), name
    assert digest_weights(arrived) == digest_weights(tensors)


def test_every_type_of_torch_that_has_whole_bytes_is_known() -> None:
    known = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
    packed = {name for name in known if name.startswith(("q", "bits", "uint1b")) or "_x2" in name}
    narrow = {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
    assert known - packed - narrow - set(ITEM_BYTES) - {"bit"} == set()
    for name in DTYPES:
        assert torch.empty(1, dtype=getattr(torch, name)).element_size() == ITEM_BYTES[name]


@pytest.mark.parametrize("bucket_bytes", [64, 192, 2**16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_arrives_bit_for_bit(dtype: str, bucket_bytes: int) -> None:
    whole = noise(dtype, 7, 5, 3)
    tensors = {
        "whole": whole,
        "scalar": noise(dtype),
        "one": noise(dtype, 1),
        "empty": noise(dtype, 0),
        "empty in one direction": noise(dtype, 3, 0, 2),
        "transposed": whole.permute(2, 0, 1),
        "strided": whole[::2, 1:4:2],
        "slice": whole[2:5],
        "column": whole[:, 2, :],
        "expanded": noise(dtype, 1, 4).expand(6, 4),
        "one row of columns": noise(dtype, 1, 40, 9).transpose(1, 2),
        "long": noise(dtype, 1001),
    }
    assert_arrives(tensors, bucket_bytes)


@pytest.mark.parametrize("dtype", ["complex32", "complex64", "complex128"])
def test_lazily_conjugated_and_negated_tensors(dtype: str) -> None:
    value = noise(dtype, 40)
    value.view(-1).view(torch.uint8)[:] = torch.arange(value.numel() * value.element_size()).to(torch.uint8) % 60
    conjugated = value.conj()
    assert conjugated.is_conj()
    tensors = {"value": value, "conjugated": conjugated, "negated": conjugated.imag}
    assert conjugated.imag.is_neg()
    assert all(not entry.same_as for entry in describe(tensors).entries), "they share memory, not values"
    assert_arrives(tensors, 64)


def test_random_sets_through_random_buckets() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        tensors: dict[str, torch.Tensor] = {}
        for number in range(chance.randint(0, 12)):
            shape = [chance.choice((0, 1, 1, 2, 3, 17)) for _ in range(chance.randint(0, 3))]
            tensor = noise(chance.choice(DTYPES), *shape, seed=seed)
            tensors[f"t{number}"] = tensor.transpose(0, -1) if tensor.dim() and chance.random() < 0.4 else tensor
            if chance.random() < 0.2:
                tensors[f"tied{number}"] = tensors[f"t{number}"]
        assert_arrives(tensors, 64 * chance.randint(1, 9))


def test_tied_tensors_travel_once_and_slices_as_themselves() -> None:
    owner = noise("float32", 8, 4)
    tensors = {"a": owner, "tied": owner, "view": owner.view(8, 4), "flat": owner.view(32), "top": owner[:4]}
    manifest = describe(tensors)
    assert [entry.same_as for entry in manifest.entries] == ["", "a", "a", "", ""]
    assert manifest.total_bytes == 32 * 4 * 2 + 16 * 4
    arrived = move(tensors, 128).tensors
    assert arrived["tied"] is arrived["a"]
    assert bits(arrived["top"]) == bits(owner[:4])


def test_a_source_read_again_gives_what_is_there_by_then() -> None:
    """The only strided tensor of a source was once copied, and the copy kept for the next version."""
    strided = torch.zeros(16, 16).t()
    source = TensorSource({"strided": strided})
    buffer = memoryview(bytearray(256))
    buckets = plan_buckets(source.manifest, 256)
    first = [source.fill(bucket, buffer) for bucket in buckets]
    strided.fill_(1.0)
    second = [source.fill(bucket, buffer) for bucket in buckets]
    assert not set(first) & set(second)


def test_a_bucket_that_was_changed_does_not_have_its_digest() -> None:
    source = TensorSource({"a": noise("float32", 100)})
    (bucket,) = plan_buckets(source.manifest, 512)
    buffer = memoryview(bytearray(512))
    digest = source.fill(bucket, buffer)
    for place in (0, 199, 399):
        buffer[place] ^= 1
        assert Staging(source.manifest).load(bucket, buffer) != digest
        buffer[place] ^= 1
    buffer[400] ^= 1  # behind the last piece
    assert Staging(source.manifest).load(bucket, buffer) == digest


def test_what_cannot_be_moved_is_named() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    cases: list[tuple[object, str]] = [
        (3, "w is a int, not a tensor"),
        (torch.ones(2, 2).to_sparse(), "relight moves dense ones"),
        (quantized, "relight moves dense ones"),
        (torch.nested.nested_tensor([torch.ones(1)]), "relight moves dense ones"),
        (torch.ones(2, device="meta"), "has no data"),
    ]
    for value, why in cases:
        with pytest.raises(UsageError, match=why):
            TensorSource({"w": value})  # type: ignore[dict-item]


def test_no_memory_and_no_such_type() -> None:
    with pytest.raises(TransferError, match=r"w: no memory for 4611686018427387904 bytes"):
        allocate(Entry("w", "uint8", (2**62,)))
    with pytest.raises(TransferError, match="this torch has no type float3"):
        allocate(Entry("w", "float3", (2,)))


def test_names_lose_the_prefixes_of_wrappers() -> None:
    names = {
        "module.a.weight": "a.weight",
        "_orig_mod.module.a.weight": "a.weight",
        "module._orig_mod.a.weight": "a.weight",
        "a.module.weight": "a.module.weight",
        "weight": "weight",
    }
    assert {name: plain_name(name) for name in names} == names


def test_the_weights_of_a_module() -> None:
    norm = torch.nn.BatchNorm1d(4)
    norm.register_buffer("scratch", torch.ones(2), persistent=False)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), norm, torch.nn.Linear(4, 3))
    names = list(weights_of(module))
    assert names == list(module.state_dict())
    assert "1.scratch" not in names
    assert not any(tensor.requires_grad for tensor in weights_of(module).values())


# --- the exchange of live and staged memory ---------------------------------------------------------------------
class Engine:
    """Live tensors, updated again and again; whatever moves, the live ones must not change before a commit."""

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self.live = live
        self.target = StagedTensors(live)

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        source = TensorSource(tensors)
        before = digest_weights(self.live)
        self.target.begin_update(source.manifest)
        buffer = memoryview(bytearray(64))
        for bucket in plan_buckets(source.manifest, 64):
            digest = source.fill(bucket, buffer)
            assert self.target.load(bucket, buffer) == digest
            assert digest_weights(self.live) == before, "live weights changed while an update was under way"
        self.target.commit()
        assert digest_weights(self.live) == digest_weights(tensors)


def published(live: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Other values for the same names; what is one tensor there is one tensor here."""
    made: dict[int, torch.Tensor] = {}
    for number, tensor in enumerate(live.values()):
        made.setdefault(id(tensor), torch.full(tensor.shape, 10.0 * version + number))
    return {name: made[id(tensor)] for name, tensor in live.items()}


def test_versions_follow_each_other_through_two_sets_of_memory() -> None:
    live = {"a": torch.zeros(40), "b": torch.nn.Parameter(torch.zeros(3, 3)), "scalar": torch.zeros(())}
    engine = Engine(live)
    places = set()
    for version in range(1, 7):
        engine.update(published(live, version))
        places.add(live["a"].data_ptr())
    assert len(places) == 2
    assert live["b"].requires_grad


def test_each_live_tensor_owns_its_memory_alone() -> None:
    """As a module's parameters do: saving one of them does not save the others."""
    live = {"a": torch.zeros(40), "b": torch.zeros(3, 3)}
    engine = Engine(live)
    for version in range(1, 4):
        engine.update(published(live, version))
        file = io.BytesIO()
        torch.save(live["b"], file)
        assert file.tell() < 4096
        assert {name: t.untyped_storage().nbytes() for name, t in live.items()} == {"a": 160, "b": 36}


def test_memory_that_anything_live_uses_is_not_given_to_the_next_update() -> None:
    """Tied by hand between two updates: what cannot be exchanged any more stays where it was."""
    live = {"a": torch.zeros(20), "b": torch.zeros(20), "c": torch.zeros(5)}
    engine = Engine(live)
    engine.update(published(live, 1))
    engine.update(published(live, 2))
    live["b"].data = live["a"].data  # under one name each, but one memory
    for version in range(3, 7):
        value = torch.full((20,), float(version))
        engine.update({"a": value, "b": value.clone(), "c": torch.full((5,), float(version))})
        assert live["a"].data_ptr() == live["b"].data_ptr()


def test_tied_tensors_under_any_first_name() -> None:
    """The publisher met the other name first: the memory that is live became the next update's staging."""
    tied = torch.zeros(20)
    live = {"a": tied, "b": tied, "c": torch.zeros(3)}
    engine = Engine(live)
    for version in range(1, 7):
        value = torch.full((20,), float(version))
        other = torch.full((3,), 100.0 + version)
        weights = {"a": value, "b": value, "c": other}
        names = ("b", "c", "a") if version <= 3 else ("a", "b", "c")  # staging is kept while the order is
        engine.update({name: weights[name] for name in names})
        assert live["a"] is live["b"]


def test_a_slice_that_shares_its_owners_memory() -> None:
    """The owner got new memory, the slice kept the old, which was the next update's staging."""
    owner = torch.zeros(8, 4)
    live = {"owner": owner, "top": owner[:4], "alone": torch.zeros(5)}
    engine = Engine(live)
    for version in range(1, 6):
        value = torch.full((8, 4), float(version))
        value[4:] += 0.5
        engine.update({"owner": value, "top": value[:4], "alone": torch.full((5,), float(version))})
        assert live["top"].data_ptr() == live["owner"].data_ptr()


def test_tied_here_and_not_there_and_the_other_way_round() -> None:
    apart = {"a": torch.zeros(20), "b": torch.zeros(20)}
    engine = Engine(apart)
    for version in range(1, 5):
        value = torch.full((20,), float(version))
        engine.update({"a": value, "b": value})
    engine.update({"a": torch.full((20,), 8.0), "b": torch.full((20,), 9.0)})
    engine.update({"a": torch.full((20,), 10.0), "b": torch.full((20,), 11.0)})

    tied = torch.zeros(20)
    engine = Engine({"a": tied, "b": tied})
    for version in range(1, 5):
        engine.update({"a": torch.full((20,), float(version)), "b": torch.full((20,), float(version))})


def test_live_tensors_of_every_layout() -> None:
    whole = torch.zeros(6, 6)
    live = {"columns": torch.zeros(6, 5).t(), "left": whole[:, :3], "right": whole[:, 3:], "alias": whole.detach()}
    live = {name: live[name] for name in ("columns", "left", "right")}
    with torch.inference_mode():
        live["inference"] = torch.zeros(7)
    engine = Engine(live)
    for version in range(1, 5):
        engine.update(published(live, version))


def test_a_commit_that_breaks_off_does_not_leave_live_memory_for_staging() -> None:
    """Tensors that were exchanged before the error are live; the next update must not be loaded into them."""
    live = {"a": torch.zeros(20), "b": torch.zeros(1).expand(20)}  # b cannot be written
    target = StagedTensors(live)
    source = TensorSource({"a": torch.ones(20), "b": torch.ones(20)})
    (bucket,) = plan_buckets(source.manifest, 256)
    buffer = memoryview(bytearray(256))
    target.begin_update(source.manifest)
    source.fill(bucket, buffer)
    target.load(bucket, buffer)
    with pytest.raises(RuntimeError):
        target.commit()
    before = live["a"].clone()
    second = TensorSource({"a": torch.full((20,), 2.0), "b": torch.full((20,), 2.0)})
    target.begin_update(second.manifest)
    second.fill(bucket, buffer)
    target.load(bucket, buffer)
    assert torch.equal(live["a"], before)


def resident_pages(tensor: torch.Tensor) -> int:
    """The pages of a tensor that are resident."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), seen) == 0
    return sum(page & 1 for page in seen)


def test_memory_is_there_before_an_update_needs_it() -> None:
    size = 20 * 2**20  # more than is populated at a time
    staging = Staging(describe({"w": torch.empty(size, dtype=torch.uint8)}))
    weights = staging.tensors["w"]
    assert not resident_pages(weights)
    weights[:5] = 7
    for thread in staging.populate():
        thread.join(60)
    assert resident_pages(weights) == size // mmap.PAGESIZE
    assert weights[:6].tolist() == [7, 7, 7, 7, 7, 0]


def meminfo(total_gib: int, available_gib: int) -> str:
    return f"MemTotal: {total_gib * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * 2**20} kB\n"


def test_the_last_quarter_of_the_memory_is_left_alone() -> None:
    files = {"/proc/meminfo": meminfo(100, 60)}

    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    assert is_memory_plentiful(35 * 2**30, read)
    assert not is_memory_plentiful(36 * 2**30, read)
    files["/proc/self/cgroup"] = "0::/jobs/mine\n"
    files["/sys/fs/cgroup/jobs/memory.max"] = str(40 * 2**30)
    files["/sys/fs/cgroup/jobs/memory.current"] = str(20 * 2**30)
    files["/sys/fs/cgroup/jobs/mine/memory.max"] = "max\n"
    assert is_memory_plentiful(10 * 2**30, read)
    assert not is_memory_plentiful(11 * 2**30, read)
    del files["/proc/meminfo"]
    assert not is_memory_plentiful(1, read)


def test_memory_of_the_second_update_is_there_before_the_first_where_there_is_plenty() -> None:
    size = 20 * 2**20
    if not is_memory_plentiful(4 * size):
        pytest.skip("this machine has little memory left")
    target = StagedTensors({"w": torch.zeros(size, dtype=torch.uint8)})
    target.prepare()
    following = target._following
    assert following is not None
    for thread in threading.enumerate():
        if thread.name == "relight-populate":
            thread.join(60 * PATIENCE)
    assert resident_pages(following.tensors["w"]) == size // mmap.PAGESIZE


def test_no_third_copy_where_live_tensors_keep_their_memory() -> None:
    whole = torch.zeros(8192)
    target = StagedTensors({"a": whole[:4096], "b": whole[4096:]})
    target.prepare()
    assert target._staging is not None
    assert target._following is None


def test_memory_for_the_update_after_the_first_one_is_sought_at_once() -> None:
    """After the first commit the engine's own tensors are no staging: the next copy is allocated then, and no later."""
    live = {"w": torch.zeros(4096)}
    target = StagedTensors(live)
    target.prepare()
    places = set()
    for version in range(6):
        new = {"w": torch.full((4096,), float(version))}
        manifest = describe(new)
        target.begin_update(manifest)
        staging = target._staging
        assert staging is not None
        places.add(staging.tensors["w"].data_ptr())
        move(new, 4096, staging)
        target.commit()
        assert target._staging is not None
        assert target._staging is not staging
        assert bits(live["w"]) == bits(new["w"])
    assert len(places) == 2  # the two take turns
