"""The client in token ids, against a server that answers as vLLM does, or badly."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.bench import scoring
from lab.bench.scoring import Asker
from lab.bench.verify_cli import app
from lab.errors import LabError
from lab.serving.endpoint import Endpoint

Reply = Callable[[str, dict[str, Any]], tuple[int, bytes]]


@pytest.fixture
def server() -> Iterator[Callable[[Reply], Endpoint]]:
    """Serve what a function says."""
    running: list[ThreadingHTTPServer] = []

    def start(reply: Reply) -> Endpoint:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                status, body = reply(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        running.append(made)
        return Endpoint(f"http://127.0.0.1:{made.server_address[1]}", "m")

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


def vllm(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Answers as vLLM 0.32 does."""
    if path == "/tokenize":
        return 200, json.dumps({"tokens": [1, 2, 3]}).encode()
    choice: dict[str, Any] = {"token_ids": [5, 6][: body["max_tokens"]]}
    if "logprobs" in body:
        choice["logprobs"] = {"top_logprobs": [{"token_id:5": -0.1, "token_id:7": -2.5}, {"token_id:6": -0.2, "token_id:8": -1.0}]}
    if "prompt_logprobs" in body:
        listed: list[Any] = [None]
        for token in body["prompt"][1:]:
            listed.append({str(token): {"logprob": -0.7, "decoded_token": "a"}, "9": {"logprob": -0.6, "decoded_token": "b"}})
        choice["prompt_logprobs"] = listed
    return 200, json.dumps({"choices": [choice] * body.get("n", 1)}).encode()


def ask(endpoint: Endpoint, what: Callable[[Asker], Any]) -> Any:
    async def work() -> Any:
        async with Asker(endpoint) as asker:
            return await what(asker)

    return asyncio.run(work())


def test_answers_and_scores_come_by_token_id(server: Callable[[Reply], Endpoint]) -> None:
    endpoint = server(vllm)
    assert ask(endpoint, lambda asker: asker.tokens("Hi")) == (1, 2, 3)
    (one,) = ask(endpoint, lambda asker: asker.complete([1, 2], max_tokens=2, top=2))
    assert one.ids == (5, 6)
    assert one.top[0] == {5: -0.1, 7: -2.5}
    assert len(ask(endpoint, lambda asker: asker.complete([1], max_tokens=2, n=4))) == 4
    scored = ask(endpoint, lambda asker: asker.score([1, 2], [5, 6]))
    assert len(scored) == 2
    assert scored[0].best == 9
    assert scored[0].regret(5) == pytest.approx(0.1)
    assert scored[0].regret(9) == 0
    assert scored[0].regret(77) == scoring.FAR
    assert scored[1].texts[6] == "a"
    assert ask(endpoint, lambda asker: asker.score([1, 2], [])) == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda *_: (500, b"boom"), "500"),
        (lambda *_: (200, b"<html>"), "not JSON"),
        (lambda *_: (200, b"[]"), "did not answer"),
        (lambda *_: (200, b'{"error": {"message": "out of memory"}}'), "out of memory"),
        (lambda *_: (200, b'{"choices": [{"logprobs": {"top_logprobs": []}}]}'), "gives no 'token_ids'"),
        (lambda *_: (200, b'{"choices": 5}'), "not as vLLM's"),
        (lambda *_: (200, b'{"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [{"a": 1}]}}]}'), "not as vLLM's"),
        (lambda *_: (200, b'{"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [null]}}]}'), "not as vLLM's"),
        (lambda *_: (200, b'{"choices": []}'), "gave 0 answers"),
        (lambda *_: (200, b'{"choices": [{"token_ids": [1], "prompt_logprobs": null}]}'), "gives no 'logprobs'"),
    ],
)
def test_a_server_that_cannot_be_used_is_said_to_be_one(reply: Reply, words: str, server: Callable[[Reply], Endpoint]) -> None:
    with pytest.raises(LabError) as raised:
        ask(server(reply), lambda asker: asker.complete([1], max_tokens=1, top=2))
    assert words in str(raised.value)


def test_a_server_that_is_gone_is_said_to_be_gone() -> None:
    with pytest.raises(LabError, match="did not answer"):
        ask(Endpoint("http://127.0.0.1:9", "m"), lambda asker: asker.tokens("Hi"))


def test_the_first_failure_of_many_is_raised_as_it_is() -> None:
    async def one(number: int) -> int:
        if number == 3:
            raise LabError("three")
        await asyncio.sleep(0.01)
        return number

    async def work(most: int) -> list[int]:
        return await scoring.in_flight(one, range(most), 2)

    assert asyncio.run(work(3)) == [0, 1, 2]
    with pytest.raises(LabError, match="three"):
        asyncio.run(work(9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], "baseline is what a draft is compared with"),
        (["--draft", "int4"], "no draft 'int4'"),
        (["--recipe", "nothing"], "no recipe called 'nothing'"),
        (["-k", "99"], "out of range"),
        (["--temperature", "1.5"], "temperature 1.5"),
        (["--samples", "10"], "too few"),
        (["--concurrency", "0"], "different numbers"),
        (["--max-tokens", "1"], "at least 2 tokens"),
        (["--prompts", "/does/not/exist.jsonl"], "cannot be read"),
        (["--draft", "bf16", "--draft", "fp8", "--output", "x.json"], "--output names one file"),
    ],
)
def test_bad_input_is_refused_before_an_engine_starts(arguments: list[str], words: str) -> None:
    ran = CliRunner().invoke(app, arguments)
    assert isinstance(ran.exception, LabError), ran.output
    assert words in str(ran.exception)


def test_a_baseline_that_is_sure_everywhere_tells_nothing_of_its_rounding(server: Callable[[Reply], Endpoint]) -> None:
    from lab.bench import lossless
    from lab.bench.prompts import Prompt

    def sure(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return vllm(path, body)
        choice: dict[str, Any] = {"token_ids": [5, 6][: body["max_tokens"]]}
        choice["logprobs"] = {"top_logprobs": [{"token_id:5": -0.01, "token_id:7": -5.0}, {"token_id:6": -0.01, "token_id:8": -5.0}]}
        listed = [{str(token): {"logprob": -0.01}, "9": {"logprob": -5.0}} for token in body["prompt"][1:]]
        choice["prompt_logprobs"] = [None, *listed]
        return 200, json.dumps({"choices": [choice]}).encode()

    plan = lossless.Plan((Prompt("a", "chat", "Hi"),), concurrency=(1,), max_tokens=2, temperatures=(), samples=0)
    with pytest.raises(LabError, match="own rounding cannot be measured") as caught:
        ask(server(sure), lambda asker: lossless.ask_baseline(asker, plan, lambda _: None))
    assert "within 2 nats" in caught.value.why
