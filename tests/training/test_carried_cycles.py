"""Values that lead back to themselves: remembered once, compared and put back whole."""

from collections.abc import Callable
from typing import Any

import pytest

from relight.training.state.values.marks import changed, put_back, remember


class Node:
    def __init__(self, parent: "Node | None") -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.visits = 0


def tree(depth: int, width: int, parent: Node | None = None) -> Node:
    node = Node(parent)
    node.children = [tree(depth - 1, width, node) for _ in range(width)] if depth else []
    return node


def marks(mark: Any) -> int:
    """Return the number of values that a mark remembers."""
    saved = getattr(mark, "saved", None)
    parts = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else ()
    return 1 + sum(marks(part) for part in parts)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_a_tree_whose_children_know_their_parent_is_remembered_once(width: int) -> None:
    nodes = sum(width**level for level in range(5))
    assert marks(remember(tree(4, width))) <= 6 * nodes


def test_all_of_a_tree_is_put_back() -> None:
    root = tree(3, 3)
    mark = remember(root)
    leaf = root.children[2].children[1].children[0]
    changes: list[Callable[[], None]] = [
        lambda: setattr(leaf, "visits", 9),
        lambda: leaf.children.append(Node(leaf)),
        lambda: setattr(leaf, "parent", root),
        root.children.reverse,
    ]
    for change in changes:
        assert not changed(mark, root)
        change()
        assert changed(mark, root)
        put_back(mark)
    assert not changed(mark, root)
    assert (leaf.visits, leaf.children, leaf.parent) == (0, [], root.children[2].children[1])


def test_what_is_first_met_too_deep_is_remembered_where_it_is_met_again() -> None:
    shared = [1]
    deep: list[Any] = [shared]
    for _ in range(20):
        deep = [deep]
    both = [deep, shared]
    mark = remember(both)
    shared.append(2)
    assert changed(mark, both)
    put_back(mark)
    assert shared == [1]
