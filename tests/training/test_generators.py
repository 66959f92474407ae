"""States of random generators: put back, and set in another process's object, also as to what they spawn."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relight.training.data import held
from relight.training.state.values.generators import generator_state, same_state, set_generator_state
from relight.transfer.io.codec import decode_tree, encode_tree

SPAWNING: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "generator": (np.random.default_rng, lambda g: g.spawn(2)[1].random()),
    "bits": (np.random.PCG64, lambda g: np.random.Generator(g.spawn(2)[1]).random()),
    "seeds": (np.random.SeedSequence, lambda s: float(s.spawn(2)[1].generate_state(1)[0])),
    "seeds of many words": (lambda n: np.random.SeedSequence([n, 2**80]), lambda s: s.spawn(1)[0].generate_state(1)[0]),
}
DRAWING: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "random": (random.Random, lambda g: g.random()),
    "legacy": (np.random.RandomState, lambda g: g.random()),
    "generator draws": (np.random.default_rng, lambda g: g.random()),
    "torch": (lambda n: torch.Generator().manual_seed(n), lambda g: torch.rand(1, generator=g).item()),
}
ALL = {**SPAWNING, **DRAWING}


@pytest.mark.parametrize("name", ALL)
def test_a_state_is_put_back(name: str) -> None:
    make, draw = ALL[name]
    value = make(3)
    draw(value)
    state = generator_state(value)
    drawn = draw(value)
    assert not same_state(state, generator_state(value))
    set_generator_state(value, state)
    assert same_state(state, generator_state(value))
    assert draw(value) == drawn
    other = make(4)
    set_generator_state(other, state)
    assert draw(other) == drawn


@pytest.mark.parametrize("name", [name for name in ALL if name != "bits"])
def test_a_dataset_s_generator(name: str) -> None:
    make, draw = ALL[name]
    value = make(3)
    draw(value)
    state = decode_tree(encode_tree(held.state_of(value), "state"))
    drawn = draw(value)
    other = make(4)
    held.set_state(other, state)
    assert draw(other) == drawn
    held.reseed({"a": other}, 8)
    held.reseed({"a": value}, 8)
    assert draw(value) == draw(other)
