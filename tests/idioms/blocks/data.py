"""Data of composed scripts: lines of setup, the argument `data=`, and what a step unpacks.

All draw on the tensors `inputs` and `labels` of 40 examples for each rank, 8 of them a batch and rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One way to hand over data."""

    handed: str = ""  # the expression after data=; empty: nothing
    imports: tuple[str, ...] = ()
    definitions: str = ""
    setup: tuple[str, ...] = ()
    unpack: str = "x, y = batch"


_DATASET = "dataset = TensorDataset(inputs, labels)"
_SAMPLER = "sampler = DistributedSampler({}, job.world_size, job.rank, shuffle=True, seed=3)"
_LOADER = "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset"
_STATEFUL = "from torchdata.stateful_dataloader import StatefulDataLoader"

_NOISY = """
class Noisy(torch.utils.data.Dataset):
    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        x = self.inputs[index]
        return x + 0.1 * torch.randn_like(x), self.labels[index]
"""
_FLIPPING = """
class Flipping(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x.flip(1), y
"""
_COLLATE = """
def collate(examples):
    x = torch.stack([x for x, _ in examples])
    return (x - x.mean(0)) / (x.std(0) + 1e-3), torch.stack([y for _, y in examples])
"""


def _from_loader(make: str, *imports: str, dataset: str = _DATASET, definitions: str = "") -> Source:
    name = dataset.split(" = ", maxsplit=1)[0]
    return Source("loader", (_LOADER, *imports), definitions, (dataset, _SAMPLER.format(name), f"loader = {make}"))


SOURCES = {
    "function": Source(
        "batch_of",
        setup=(
            "",
            "def batch_of(number):",
            "    first = (number * job.world_size + job.rank) * 8 % len(inputs)",
            "    return inputs[first : first + 8], labels[first : first + 8]",
            "",
        ),
    ),
    "list": Source(
        "batches",
        setup=(
            "size = 8 * job.world_size",
            "batches = [(inputs[i : i + size], labels[i : i + size]) for i in range(0, len(inputs), size)]",
        ),
        unpack="x, y = (part[job.rank :: job.world_size] for part in batch)",
    ),
    "own": Source(
        setup=(
            "order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(5))",
            "every = 5 * job.world_size",
        ),
        unpack="x, y = (part[order[(step.number * every // 5 + job.rank) % 4 :: every]] for part in (inputs, labels))",
    ),
    "loader": _from_loader("DataLoader(dataset, batch_size=8, sampler=sampler)"),
    "loader-workers": _from_loader("DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1)"),
    "stateful": _from_loader("StatefulDataLoader(dataset, batch_size=8, sampler=sampler)", _STATEFUL),
    "stateful-workers": _from_loader(
        "StatefulDataLoader(noisy, batch_size=8, sampler=sampler, num_workers=1)",
        _STATEFUL,
        dataset="noisy = Noisy(inputs, labels)",
        definitions=_NOISY,
    ),
    "subclass": _from_loader("Flipping(dataset, batch_size=8, sampler=sampler)", definitions=_FLIPPING),
    "generator": Source(
        "loader",
        (_LOADER,),
        setup=(
            _DATASET,
            "generator = torch.Generator().manual_seed(11)",
            "loader = DataLoader(dataset, batch_size=8 * job.world_size, shuffle=True, generator=generator)",
        ),
        unpack="x, y = (part[job.rank :: job.world_size] for part in batch)",
    ),
    "augmented": _from_loader(
        "DataLoader(noisy, batch_size=8, sampler=sampler)", dataset="noisy = Noisy(inputs, labels)", definitions=_NOISY
    ),
    "collate": _from_loader(
        "DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)", definitions=_COLLATE
    ),
}
