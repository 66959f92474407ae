"""Slurm's lists of hosts: every list that is written is read back, and what is no list is refused."""

import random

import pytest

from relight.cluster.node_list import MAX_HOSTS, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2,4],login", "n1 n2 n4 login"),
        ("gpu[008-011]-ib", "gpu008-ib gpu009-ib gpu010-ib gpu011-ib"),
        ("n[9-11]", "n9 n10 n11"),
        ("r[1-2]n[3-4]", "r1n3 r1n4 r2n3 r2n4"),
        ("a.b-c[07]", "a.b-c07"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text", ["", ",", "n1,", ",n1", "n1,,n2", "n[", "n[]", "n[1", "n[2-1]", "n[a]", "n]", "n[1-2-3]", "n 1", "n[1,]"]
)
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand(text)


@pytest.mark.parametrize("text", [f"n[1-{MAX_HOSTS + 1}]", "a[1-300]b[1-300]", "n[1-99999999999999]"])
def test_no_list_is_longer_than_a_cluster(text: str) -> None:
    with pytest.raises(ValueError, match="more than"):
        expand(text)


@pytest.mark.parametrize("seed", range(100))
def test_a_list_that_was_folded_is_unfolded(seed: int) -> None:
    """Fold random hosts as Slurm does: those of one prefix and width in one pair of brackets."""
    draw = random.Random(seed)
    hosts, parts = list[str](), list[str]()
    for _ in range(draw.randint(1, 4)):
        prefix, suffix = draw.choice(["n", "gpu-", "rack1x"]), draw.choice(["", "-ib", ".local"])
        if draw.random() < 0.3:
            hosts.append(f"{prefix}a{suffix}")
            parts.append(hosts[-1])
            continue
        ranges, width = list[str](), draw.choice([1, 3])
        for _ in range(draw.randint(1, 3)):
            first, more = draw.randint(0, 120), draw.randint(0, 5)
            ranges.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
            hosts += [f"{prefix}{number:0{width}}{suffix}" for number in range(first, first + more + 1)]
        parts.append(f"{prefix}[{','.join(ranges)}]{suffix}")
    assert expand(",".join(parts)) == tuple(hosts)
