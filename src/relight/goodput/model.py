"""The cost of failures in a job of many devices: relight beside checkpoint and restart. Pure; all times in seconds.

Two independent ways to the same figures, which check each other: formulas for the mean (`restart_goodput`,
`relight_goodput`) and a simulation of one failure after the other (`simulate_restart`, `simulate_relight`).

The cost of checkpoint and restart, and its best interval, are those of Young (1974) in the form
`F(t) = m (s0 + t/2) + (d/t) k0` for m failures in a time d: each failure costs the restart s0 and half an interval on
average, and each interval a checkpoint k0; so `t* = sqrt(2 d k0 / m)`.
"""

import math
import random
from dataclasses import dataclass

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 devices (arXiv 2407.21783, section 3.3.4).
MTBF_DEVICE_SECONDS = 16_384 * 54 * 86_400 / 419
# A synchronous restart at about 100,000 devices, as published: of these stages only the last but one grows with them.
_RESTART_DEVICES = 100_000
_DETECT, _SCHEDULE, _LOAD, _FORM, _FIRST_STEP = 60.0, 120.0, 120.0, 250.0, 200.0
MAX_REPLICAS = 64


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job and the machines it runs on."""

    devices: int
    mtbf_device_seconds: float = MTBF_DEVICE_SECONDS  # mean time to an interruption, of one device
    step_seconds: float = 10.0
    checkpoint_seconds: float = 30.0  # that training pauses for one checkpoint
    restart_seconds: float = 0.0  # 0: `published_restart_seconds`
    notice_seconds: float = 0.2  # relight: failure until all are paused and know what to do
    form_seconds: float = 0.0  # forming the process group of so many devices; 0: the published figure's share
    state_bytes: float = 20e9  # on one device: what a replacement copies
    link_bytes_per_second: float = 12.5e9
    replicas: int = 8  # hosts that hold a copy of the same shard
    devices_per_host: int = 8  # a failure takes a host with all of these out of the job
    standby_hosts: int = 16
    repair_seconds: float = 4 * 3600.0  # until a failed host can be a standby again
    cold_start_seconds: float = _SCHEDULE + _LOAD  # relight: with no standby left, the scheduler gives another host
    least_durable_seconds: float = 3600.0  # relight: between checkpoints, which only lost shards need

    @property
    def failures_per_second(self) -> float:
        """Failures of all training devices together."""
        return self.devices / self.mtbf_device_seconds

    @property
    def restart(self) -> float:
        """Seconds from a failure until a restarted job computes new steps, besides repeating lost ones."""
        return self.restart_seconds or published_restart_seconds(self.devices)

    @property
    def forming(self) -> float:
        return self.form_seconds or _FORM * self.devices / _RESTART_DEVICES

    @property
    def durable_interval(self) -> float:
        """Seconds between relight's checkpoints: never more often than without relight."""
        return max(self.least_durable_seconds, best_interval_seconds(self))

    @property
    def recovery(self) -> float:
        """Seconds of one recovery with a standby at hand: what others do meanwhile is not counted twice."""
        return self.notice_seconds + max(self.forming, self.state_bytes / self.link_bytes_per_second)


def published_restart_seconds(devices: int) -> float:
    """A restart of so many devices: detect, schedule, load, form the groups (which grows), first step."""
    return _DETECT + _SCHEDULE + _LOAD + _FORM * devices / _RESTART_DEVICES + _FIRST_STEP


# --- formulas -----------------------------------------------------------------------------------------------------
def best_interval_seconds(cluster: Cluster) -> float:
    """Return the best interval of checkpoints for a job that restarts: `t*` (see the module)."""
    return math.sqrt(2 * cluster.checkpoint_seconds / cluster.failures_per_second)


def restart_goodput(cluster: Cluster, interval_seconds: float) -> float:
    """Share of the time in which new steps are computed, with a checkpoint after each interval of them.

    Exact for failures without memory: the time to get through an interval and its checkpoint, begun again at each
    failure after a restart that may fail too (Daly 2006, equation 20, with the restart as work to be done).
    """
    rate, restart = cluster.failures_per_second, cluster.restart
    segment = interval_seconds + cluster.checkpoint_seconds
    exponent = rate * (segment + restart)
    if exponent > 700:  # practically nothing ever gets through
        return 0.0
    elapsed = math.exp(rate * restart) * math.expm1(rate * segment) / rate
    return interval_seconds / elapsed


def relight_goodput(cluster: Cluster) -> float:
    """Return the goodput with relight. Its costs, for each second of new steps:

    - each failure: a recovery, half a step on average, and maybe waiting for a standby;
    - checkpoints, which are taken all the same, but seldom;
    - each loss of all replicas of a shard: a restart from the last checkpoint.
    """
    rate = cluster.failures_per_second
    # A failure during a recovery begins it again; the exponential is the mean time until one gets through.
    pause = math.expm1(min(700.0, rate * (cluster.recovery + waiting_seconds(cluster)))) / rate
    fallback = cluster.restart + cluster.durable_interval / 2
    return 1 / (
        1
        + rate * (pause + cluster.step_seconds / 2)
        + cluster.checkpoint_seconds / cluster.durable_interval
        + shard_losses_per_second(cluster) * fallback
    )


def waiting_seconds(cluster: Cluster) -> float:
    """Mean time that a failure waits for another host because no standby is left."""
    return chance_of_no_standby(cluster, cluster.standby_hosts) * cluster.cold_start_seconds


def chance_of_no_standby(cluster: Cluster, standbys: int) -> float:
    """Return the chance that a failure finds every one of `standbys` used up.

    Hosts in repair are as many as calls on unlimited lines (Erlang): Poisson, however long each repair takes.
    """
    load = cluster.failures_per_second * cluster.repair_seconds
    return max(0.0, 1.0 - sum(chance for count, chance in _poisson(load) if count < standbys))


def standbys_for(cluster: Cluster, chance: float) -> int:
    """The least number of standbys with which at most this share of the failures finds none."""
    load = cluster.failures_per_second * cluster.repair_seconds
    below = 0.0
    for count, probability in _poisson(load):
        if 1.0 - below <= chance:
            return count
        below += probability
    raise ArithmeticError(f"no number of standbys makes {chance:g}")


def shard_losses_per_second(cluster: Cluster) -> float:
    """Return the rate at which all replicas of some shard are lost within one recovery: then a checkpoint is needed.

    Failures of different hosts are independent here. A power or network failure that takes several hosts is not:
    keep the replicas of a shard in different failure domains.
    """
    one = cluster.devices_per_host / cluster.mtbf_device_seconds  # failures of one host
    shards = cluster.devices / cluster.replicas
    exposed = cluster.recovery + waiting_seconds(cluster)
    orders = math.factorial(cluster.replicas)
    return shards * orders * one * (one * exposed) ** (cluster.replicas - 1)


def _poisson(mean: float) -> list[tuple[int, float]]:
    """Counts that matter, with their chances."""
    last = int(mean + 12 * math.sqrt(mean) + 30)
    return [(count, math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))) for count in range(last + 1)]


# --- simulation ---------------------------------------------------------------------------------------------------
def simulate_restart(cluster: Cluster, interval_seconds: float, duration_seconds: float, seed: int) -> float:
    """Goodput of one simulated job that restarts from its checkpoints."""
    chance = random.Random(seed)
    rate = cluster.failures_per_second
    now = useful = 0.0
    segment = interval_seconds + cluster.checkpoint_seconds
    to_do = segment
    while now < duration_seconds:
        failure = chance.expovariate(rate)
        if failure >= to_do:
            now += to_do
            useful += interval_seconds
            to_do = segment
        else:
            now += failure
            to_do = cluster.restart + segment  # a failure in the restart begins it again
    return useful / now


def simulate_relight(cluster: Cluster, duration_seconds: float, seed: int) -> float:
    """Goodput of one simulated job with relight: standbys are used up and come back repaired. No shard is lost."""
    chance = random.Random(seed)
    rate = cluster.failures_per_second
    repaired: list[float] = []  # when each host in repair will be back, in order
    now = useful = 0.0
    checkpointing = cluster.checkpoint_seconds / cluster.durable_interval
    while now < duration_seconds:
        failure = chance.expovariate(rate)
        now += failure
        useful += failure / (1 + checkpointing)
        lost = chance.random() * cluster.step_seconds
        useful = max(0.0, useful - lost)
        while True:
            repaired = [at for at in repaired if at > now]
            needed = cluster.recovery
            if len(repaired) >= cluster.standby_hosts:
                needed += cluster.cold_start_seconds
            repaired.append(now + cluster.repair_seconds)
            another = chance.expovariate(rate)  # another failure meanwhile: the recovery begins again
            now += min(another, needed)
            if another >= needed:
                break
    return useful / now
