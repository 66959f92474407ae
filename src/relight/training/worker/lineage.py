"""The lineage of a version: a hash chain over all committed steps, equal on all ranks."""

import xxhash


def first_lineage(seed: int, world_size: int, layout: str) -> str:
    """Return the lineage of version 0."""
    return xxhash.xxh3_64_hexdigest(f"{seed}/{world_size}/{layout}".encode())


def next_lineage(lineage: str, version: int, world_size: int) -> str:
    """Return the lineage once one more step than `version` is committed."""
    return xxhash.xxh3_64_hexdigest(f"{lineage}/{version}/{world_size}".encode())
