"""The cost of failures: formulas against a simulation of one failure after the other, and against common sense."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.cli import main
from relight.goodput.model import (
    MTBF_DEVICE_SECONDS,
    Cluster,
    best_interval_seconds,
    chance_of_no_standby,
    published_restart_seconds,
    relight_goodput,
    restart_goodput,
    shard_losses_per_second,
    simulate_relight,
    simulate_restart,
    standbys_for,
)

YEAR = 365 * 86_400.0
clusters = st.builds(
    Cluster,
    devices=st.integers(8, 100_000),
    mtbf_device_seconds=st.floats(1e7, 1e9),
    step_seconds=st.floats(0.1, 60),
    checkpoint_seconds=st.floats(0.1, 300),
    standby_hosts=st.integers(0, 30),
)


def test_the_published_figures() -> None:
    assert 1 / Cluster(devices=16_384).failures_per_second == pytest.approx(3.1 * 3600, rel=0.01)
    assert published_restart_seconds(100_000) == 750


@given(clusters)
def test_the_best_interval_is_the_best(cluster: Cluster) -> None:
    """Young's interval is the first order of the exact optimum, so near it nothing is much better."""
    interval = best_interval_seconds(cluster)
    best = restart_goodput(cluster, interval)
    for factor in (0.25, 0.5, 2.0, 4.0):
        if cluster.failures_per_second * (interval + cluster.checkpoint_seconds) < 0.05:
            assert restart_goodput(cluster, interval * factor) <= best * 1.001


@given(clusters)
def test_shares_are_shares_and_fewer_failures_are_better(cluster: Cluster) -> None:
    rarer = dataclasses.replace(cluster, mtbf_device_seconds=2 * cluster.mtbf_device_seconds)
    for goodput in (relight_goodput, lambda c: restart_goodput(c, best_interval_seconds(c))):
        assert 0.0 <= goodput(cluster) <= goodput(rarer) <= 1.0
    assert shard_losses_per_second(rarer) <= shard_losses_per_second(cluster)


@pytest.mark.parametrize("devices", [1024, 16_384, 100_000])
def test_formula_and_simulation_of_restarting_agree(devices: int) -> None:
    cluster = Cluster(devices=devices)
    interval = best_interval_seconds(cluster)
    simulated = simulate_restart(cluster, interval, 20 * YEAR, seed=1)
    assert simulated == pytest.approx(restart_goodput(cluster, interval), rel=0.01)


@pytest.mark.parametrize("standby_hosts", [0, 3, 30])
@pytest.mark.parametrize("devices", [1024, 16_384, 100_000])
def test_formula_and_simulation_of_recovering_agree(devices: int, standby_hosts: int) -> None:
    cluster = Cluster(devices=devices, standby_hosts=standby_hosts)
    # The formula counts the standbys of a job that never stands still; a real one fails less while it does.
    assert simulate_relight(cluster, 5 * YEAR, seed=1) == pytest.approx(relight_goodput(cluster), rel=0.03)


@given(clusters, st.floats(0.0001, 0.5))
def test_the_least_number_of_standbys(cluster: Cluster, chance: float) -> None:
    count = standbys_for(cluster, chance)
    assert chance_of_no_standby(cluster, count) <= chance + 1e-9
    assert not count or chance_of_no_standby(cluster, count - 1) > chance - 1e-9


def test_without_standbys_every_failure_waits() -> None:
    assert chance_of_no_standby(Cluster(devices=64), 0) == 1.0


def test_shards_are_lost_as_often_as_pairs_of_hosts_fail_together() -> None:
    """Two replicas: each failure of one is a loss if the other fails within one recovery."""
    cluster = Cluster(devices=16, devices_per_host=8, replicas=2, standby_hosts=100, form_seconds=1000)
    host = 8 / MTBF_DEVICE_SECONDS
    shards = 8
    assert shard_losses_per_second(cluster) == pytest.approx(shards * 2 * host * host * cluster.recovery, rel=1e-6)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--devices", "2048", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (mine,) = [estimate for estimate in document["estimates"] if estimate["devices"] == 2048]
    assert mine["restart_goodput"] < mine["relight_goodput"] < 1
    assert math.isclose(document["simulated"]["relight_goodput"], mine["relight_goodput"], rel_tol=0.05)
    assert main(["simulate", "--devices", "2048"]) == 0
    shown = capsys.readouterr().out
    assert f"{mine['relight_goodput']:.1%}" in shown
    assert "2,048" in shown


@pytest.mark.parametrize(
    "flags",
    [["--devices", "0"], ["--replicas", "65"], ["--step-seconds", "nan"], ["--days", "0"], ["--state-gib", "-1"]],
)
def test_wrong_arguments(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert f"{flags[0]} " in capsys.readouterr().err
