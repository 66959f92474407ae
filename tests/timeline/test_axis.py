from hypothesis import given
from hypothesis import strategies as st

from relight.timeline.model.axis import plan_axis, share_columns


def test_time_is_to_scale_if_nothing_dominates() -> None:
    axis = plan_axis(0, 100, 50, [20, 40, 60])
    assert axis.cuts == ()
    assert [axis.coordinate(t) for t in (0, 20, 50, 100)] == [0, 10, 25, 50]


def test_a_quiet_stretch_that_would_fill_the_figure_is_shortened() -> None:
    axis = plan_axis(0, 30_300, 72, [100, 30_100, 30_200])
    (cut,) = axis.cuts
    assert (cut.start_ns, cut.end_ns, cut.columns) == (100, 30_100, 12)
    assert axis.coordinate(100) == 20
    assert axis.coordinate(30_100) == 32
    assert axis.coordinate(30_200) == 52


def test_two_long_stretches_of_similar_length_are_both_shortened() -> None:
    axis = plan_axis(0, 50_300, 72, [100, 30_100, 30_200, 50_200])
    assert [(cut.start_ns, cut.end_ns) for cut in axis.cuts] == [(100, 30_100), (30_200, 50_200)]


def test_a_moment_outside_lies_at_the_edge() -> None:
    axis = plan_axis(10, 20, 30)
    assert (axis.coordinate(0), axis.coordinate(99)) == (0, 30)
    assert axis.column(20) == 29


@given(
    st.integers(0, 1000),
    st.integers(0, 10**9),
    st.integers(24, 200),
    st.lists(st.integers(0, 10**9), max_size=20),
)
def test_positions_never_go_back(start: int, length: int, columns: int, changes: list[int]) -> None:
    axis = plan_axis(start, start + length, columns, changes)
    positions = [axis.coordinate(t) for t in sorted([start, start + max(1, length), *changes])]
    assert positions == sorted(positions)
    assert axis.coordinate(start) == 0
    assert abs(axis.coordinate(start + max(1, length)) - columns) < 1e-6


def test_a_short_stretch_takes_a_column_from_a_neighbour() -> None:
    assert share_columns([0, 10, 10.2, 20], [1, 1, 1]) == [9, 1, 10]


def test_a_stretch_that_may_vanish_vanishes() -> None:
    assert share_columns([0, 10, 10.2, 20], [1, 0, 1]) == [10, 0, 10]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), min_size=1, max_size=40))
def test_no_column_is_lost_or_made(stretches: list[tuple[float, int]]) -> None:
    edges = [0.0]
    for width, _ in stretches:
        edges.append(edges[-1] + width)
    widths = share_columns(edges, [least for _, least in stretches])
    assert sum(widths) == int(edges[-1] + 0.5)
    assert min(widths) >= 0
