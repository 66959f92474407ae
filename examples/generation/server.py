"""Answers requests for text over HTTP, with weights that are replaced while it runs.

    python examples/generation/server.py runs/mine --port 8001

RUN_DIR is the run directory of a training job that publishes (or whatever place a `relight.Publisher` was given); it
need not exist yet, the job may end and another one begin. What relight needs of a server is three lines of this file:
the one that makes the `Receiver`, and two times `with receiver.serving() as version`. Every answer is computed with
exactly one version of the weights, and names it; version -1 is the random weights that the server starts with.

    POST /generate  {"prompt": "def ", "max_new_tokens": 64, "temperature": 0.8, "seed": 0, "score": ""}
                    text and version; with "score", also the loss of that text under the same weights
    GET  /version   version, generation, digest of the weights, and why they are stale if they are
    GET  /health    200, or 503 while the engine must not answer
"""

import argparse
import os
import signal
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

import relight
from relight.errors import StaleWeightsError

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))
from model import BYTES, GPT, add_model_arguments, write_on

MAX_BODY_BYTES = 2**20
SLOW_CLIENT_SECONDS = 10.0


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /generate."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 64
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.8
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    score: str = ""


class Answer(msgspec.Struct):
    text: str
    version: int
    generation: int
    loss: float | None = None


class Version(msgspec.Struct):
    version: int
    generation: int
    digest: str
    stale: str


# --- the models ---------------------------------------------------------------------------------------------------
class Writer(Protocol):
    """A model that writes, byte by byte."""

    @property
    def module(self) -> nn.Module: ...

    def write_on(self, prompt: bytes, ask: Ask) -> bytes: ...

    def logits(self, tokens: torch.Tensor) -> torch.Tensor: ...


class OwnGPT:
    """The model of examples/gpt."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.module = GPT(options).eval()

    def write_on(self, prompt: bytes, ask: Ask) -> bytes:
        return write_on(self.module, prompt, ask.max_new_tokens, ask.temperature, ask.seed)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(tokens[:, -self.module.context :])
        return logits


def tiny_llama() -> Any:
    """A small Hugging Face model with random weights, made from its configuration alone; its tokens are bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class HuggingFace:
    """A model of transformers, by its own `generate`."""

    def __init__(self) -> None:
        self.module: Any = tiny_llama().eval()
        self._drawing = threading.Lock()  # `generate` draws from the process's one random generator

    def write_on(self, prompt: bytes, ask: Ask) -> bytes:
        tokens = torch.tensor([list(prompt)])
        how = {"do_sample": True, "temperature": ask.temperature} if ask.temperature else {"do_sample": False}
        if not ask.max_new_tokens:
            return b""
        with self._drawing:
            torch.manual_seed(ask.seed)
            written = self.module.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=ask.max_new_tokens, **how
            )
        return bytes(written[0, len(prompt) :].tolist())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(tokens).logits
        return logits


# --- the answers --------------------------------------------------------------------------------------------------
class Engine:
    """A model and the receiver that keeps it fresh."""

    def __init__(self, writer: Writer, place: Path, name: str) -> None:
        self._writer = writer
        self.receiver = relight.Receiver(place, model=writer.module, name=name, on_notice=say)

    @torch.no_grad()
    def generate(self, ask: Ask) -> Answer:
        prompt = ask.prompt.encode()
        with self.receiver.serving() as version:
            text = self._writer.write_on(prompt, ask).decode(errors="replace")
            loss = self._loss(ask.score.encode()) if ask.score else None
            return Answer(text=text, version=version, generation=self.receiver.generation, loss=loss)

    def _loss(self, text: bytes) -> float:
        """Mean loss of each byte after the first."""
        tokens = torch.tensor([list(text)])
        logits = self._writer.logits(tokens[:, :-1])
        return float(F.cross_entropy(logits.flatten(0, 1), tokens[0, -logits.shape[1] :]))

    def version(self) -> Version:
        if self.receiver.stale:
            return Version(-1, self.receiver.generation, "", self.receiver.stale)
        with self.receiver.serving() as version:
            digest = relight.digest_weights(relight.weights_of(self._writer.module))
            return Version(version, self.receiver.generation, digest, "")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: "Server"
    timeout = SLOW_CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path == "/version":
            self._answer(HTTPStatus.OK, self.server.engine.version())
        elif self.path == "/health":
            stale = self.server.engine.receiver.stale
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE if stale else HTTPStatus.OK, {"stale": stale})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "GET /version, GET /health or POST /generate"})

    def do_POST(self) -> None:
        if self.path != "/generate":
            self._answer(HTTPStatus.NOT_FOUND, {"error": "GET /version, GET /health or POST /generate"})
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= MAX_BODY_BYTES:
                raise ValueError(f"Content-Length {length}: at most {MAX_BODY_BYTES}")
            ask = msgspec.json.decode(self.rfile.read(length), type=Ask)
        except (ValueError, msgspec.DecodeError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        try:
            self._answer(HTTPStatus.OK, self.server.engine.generate(ask))
        except StaleWeightsError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})

    def _answer(self, status: HTTPStatus, content: object) -> None:
        body = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line for each request would drown the rest


class Server(ThreadingHTTPServer):
    """Finishes the answers under way before it ends."""

    daemon_threads = False

    def __init__(self, port: int, engine: Engine) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine = engine


def end(*_: object) -> None:
    """Finish what is under way; asked again, go on finishing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        engine = Engine(OwnGPT(options) if options.model == "gpt" else HuggingFace(), options.run_dir, options.name)
        with engine.receiver, Server(options.port, engine) as http:
            print(f"serving at http://127.0.0.1:{http.server_address[1]}", flush=True)
            http.serve_forever()
    except KeyboardInterrupt:
        pass


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Answers requests for text over HTTP, with the weights that a training job publishes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="run directory of the job that publishes; it need not exist yet")
    add("--port", type=int, default=8001, help="on 127.0.0.1; 0: any that is free")
    add("--model", choices=("gpt", "hf"), default="gpt", help="that of examples/gpt, or a tiny one of transformers")
    add("--name", default=f"server-{os.getpid()}", help="of this engine, for people")
    add("--threads", type=int, default=1, help="of torch")
    add("--seed", type=int, default=1, help="of the weights it starts with")
    add_model_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
