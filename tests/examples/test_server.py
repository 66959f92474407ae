"""The generation server as a real process: every answer names the version it was made with, and was made with it."""

import argparse
import json
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from examples.generation.server import OwnGPT, tiny_llama
from tests.survival.harness import PATIENCE

SERVER = Path(__file__).parents[2] / "examples" / "generation" / "server.py"
OPTIONS = "--layers 1 --width 32 --heads 2 --context 32".split()
SHAPE = argparse.Namespace(layers=1, width=32, heads=2, context=32, dropout=0.0)
SECONDS = 60.0 * PATIENCE


class Running:
    """A server process."""

    def __init__(self, place: Path, *arguments: str) -> None:
        command = [sys.executable, str(SERVER), str(place), "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS)[0], "the server did not start"
        line = self.process.stdout.readline().decode()
        if not line:
            pytest.fail(self.process.communicate()[1].decode())
        self.url = line.split()[-1]

    def ask(self, path: str, question: object = None) -> dict[str, Any]:
        data = None if question is None else json.dumps(question).encode()
        with urllib.request.urlopen(f"{self.url}{path}", data, timeout=SECONDS) as answer:
            content: dict[str, Any] = json.load(answer)
            return content

    def generate(self, prompt: str = "def ", **more: object) -> dict[str, Any]:
        return self.ask("/generate", {"prompt": prompt, "max_new_tokens": 24, "temperature": 0, **more})

    def wait_for_version(self, version: int) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while (held := self.ask("/version"))["version"] < version:
            assert time.monotonic() < deadline, held
            time.sleep(0.05)
        return held


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(tmp_path, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


def trained(seed: int) -> OwnGPT:
    torch.manual_seed(seed)
    return OwnGPT(SHAPE)


def publish(publisher: relight.Publisher, module: torch.nn.Module, version: int) -> str:
    weights = relight.weights_of(module)
    publisher.publish(relight.TensorSource(weights), version=version)
    return relight.digest_weights(weights)


def test_answers_come_from_the_version_that_they_name(tmp_path: Path, start: Any) -> None:
    server = start(*OPTIONS)
    models = {version: trained(seed=version) for version in (1, 2)}
    assert server.generate()["version"] == -1
    with relight.Publisher(tmp_path, stall_timeout_seconds=SECONDS) as publisher:
        assert publisher.wait_for_engines(1, SECONDS)
        for version, model in models.items():
            digest = publish(publisher, model.module, version)
            assert server.wait_for_version(version) == {
                "version": version,
                "generation": 0,
                "digest": digest,
                "stale": "",
            }
            answer = server.generate(score="import os")
            with torch.no_grad():
                expected = model.logits(torch.tensor([list(b"import o")])).log_softmax(-1)[0]
            loss = -expected[range(8), list(b"mport os")].mean()
            assert answer["version"] == version
            assert answer["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_requests_in_flight_during_updates_get_one_version_each(tmp_path: Path, start: Any) -> None:
    server = start(*OPTIONS)
    models = {version: trained(seed=version) for version in range(1, 9)}
    with relight.Publisher(tmp_path, stall_timeout_seconds=SECONDS) as publisher, ThreadPoolExecutor(4) as pool:
        assert publisher.wait_for_engines(1, SECONDS)
        publish(publisher, models[1].module, 1)
        server.wait_for_version(1)
        answers: list[dict[str, Any]] = []

        def keep_asking() -> list[int]:
            seen: list[int] = []
            while not seen or seen[-1] < max(models):
                answer = server.generate()
                answers.append(answer)
                seen.append(answer["version"])
            return seen

        asking = [pool.submit(keep_asking) for _ in range(4)]
        for version in range(2, 9):
            publish(publisher, models[version].module, version)
        for seen in [future.result(SECONDS) for future in asking]:
            assert seen == sorted(seen)
    texts = {version: {a["text"] for a in answers if a["version"] == version} for version in models}
    assert all(len(found) <= 1 for found in texts.values()), texts  # greedy: a mixture would write something else
    assert len({text for found in texts.values() for text in found}) == sum(map(bool, texts.values()))


def test_a_server_started_late_gets_the_newest_version(tmp_path: Path, start: Any) -> None:
    with relight.Publisher(tmp_path, stall_timeout_seconds=SECONDS) as publisher:
        model = trained(seed=5)
        publisher.begin(relight.TensorSource(relight.weights_of(model.module)), version=5, hold=True)
        server = start(*OPTIONS)
        assert server.wait_for_version(5)["digest"] == relight.digest_weights(relight.weights_of(model.module))
        server.process.kill()
        server.process.wait()
        assert start(*OPTIONS).wait_for_version(5)["version"] == 5


def test_nonsense_is_refused_with_a_reason(start: Any) -> None:
    server = start(*OPTIONS)
    for question in ("no json", {}, {"prompt": ""}, {"prompt": "a", "max_new_tokens": 10**6}, {"prompt": "a", "t": 3}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.ask("/generate", question)
        assert refused.value.code == 400
        assert json.load(refused.value)["error"]
    with pytest.raises(urllib.error.HTTPError) as missing:
        server.ask("/nowhere")
    assert missing.value.code == 404


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(start: Any, number: signal.Signals) -> None:
    server = start(*OPTIONS)
    assert server.ask("/health") == {"stale": ""}
    server.process.send_signal(number)
    output, errors = server.process.communicate(timeout=SECONDS)
    assert server.process.returncode == 0, errors.decode()
    assert not re.search(b"Traceback", output + errors)


def test_a_model_of_transformers_is_updated_while_it_generates(tmp_path: Path, start: Any) -> None:
    pytest.importorskip("transformers")
    server = start("--model", "hf")
    models = {}
    for version in (1, 2):
        torch.manual_seed(version)
        models[version] = tiny_llama().eval()
    drawn = {"max_new_tokens": 64, "temperature": 0.9, "seed": 7}
    with relight.Publisher(tmp_path, stall_timeout_seconds=SECONDS) as publisher, ThreadPoolExecutor(1) as pool:
        assert publisher.wait_for_engines(1, SECONDS)
        digest = publish(publisher, models[1], 1)
        assert server.wait_for_version(1)["digest"] == digest
        long_answer = pool.submit(server.generate, **drawn)
        digest = publish(publisher, models[2], 2)
        assert server.wait_for_version(2)["digest"] == digest
        answers = [long_answer.result(SECONDS), server.generate(**drawn)]
    assert answers[1]["version"] == 2
    for answer in answers:
        torch.manual_seed(7)
        written = models[answer["version"]].generate(
            torch.tensor([list(b"def ")]), max_new_tokens=64, do_sample=True, temperature=0.9
        )
        assert answer["text"] == bytes(written[0, 4:].tolist()).decode(errors="replace")
