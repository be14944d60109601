"""Servers elsewhere: how they are named, what is asked of them, and every way in which the network between goes wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving import client as streaming
from lab.serving import lanes as keeping
from lab.serving import remote
from lab.serving.attach import Address, address, addresses, chosen, from_file, named, recipe_of
from lab.serving.client import Delta, Done, Notice, generate
from lab.serving.command import Lane
from lab.serving.endpoint import Progress
from lab.serving.lanes import Lanes
from lab.serving.metrics import scrape
from lab.serving.process import free_port
from lab.trace import counted
from lab.trace.counted import UNKNOWN, rebuilt

KEY = "sk-secret-0123"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


proxies, engines = _load("proxy"), _load("fake_engine")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "EAGLE3_LAB_ATTACH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "PAUSE", 0.1)


@pytest.fixture
def proxy(fake: Any) -> Iterator[Any]:
    with proxies.serving(proxies.Proxy(fake.url, "/team/a")) as made:
        yield made


def sse(data: object) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chunk(text: str, ids: list[int], finish: str | None = None) -> bytes:
    content = [{"token": "x", "logprob": 0.0, "bytes": [*f" {one}".encode()], "top_logprobs": []} for one in ids]
    choice = {"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}
    return sse({"choices": [choice]})


def usage(accepted: list[int], drafted: list[int]) -> bytes:
    stats = {"per_step_accepted": accepted, "per_step_drafted": drafted, "num_spec_tokens": 3}
    return sse({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 7}, "metrics": {"speculative_decoding": stats}})


ANSWER = [chunk("a", [10]), chunk("bcd", [11, 12, 13]), chunk("e", [14]), chunk("fg", [15, 16], "stop")]
COUNTED = [*ANSWER, usage([2, 0, 1], [3, 3, 3]), sse("[DONE]")]


def lane_of(url: str, draft: str = "bf16") -> Lane:
    return Lane(recipe_of(named([f"{draft}={url}"])), draft)  # type: ignore[arg-type]


async def asked(lanes: Lanes, lane: Lane, **more: Any) -> tuple[list[Any], Any]:
    endpoint = await lanes.endpoint(lane)
    events = [event async for event in generate(endpoint, "hello", **more)]
    assert isinstance(events[-1], Done)
    return events, events[-1].request


# --- naming servers


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("gpu:8000", "http://gpu:8000"),
        ("http://gpu:8000/", "http://gpu:8000"),
        ("https://gpu/team/a/v1/", "https://gpu/team/a"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert address(text).url == url


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://me:hunter2@gpu", "must not hold a user name"),
        ("ftp://gpu", "no address of a server"),
        ("file:///etc/passwd", "no address of a server"),
        ("http://gpu?key=1", "no address of a server"),
        ("http://", "no address"),
        ("http://gpu:port", "no address"),
        ("", "no address"),
    ],
)
def test_what_is_no_address_is_said(text: str, words: str) -> None:
    with pytest.raises(LabError, match=words) as caught:
        address(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["http://gpu"], "cannot be read"),
        (["bf16"], "cannot be read"),
        (["a=1", "b"], "no lane called 'a'"),
        (["bf16=gpu", "BF16=gpu2"], "Two servers"),
        (["bf16=gpu", "fp8"], "does not say which lane"),
    ],
)
def test_options_that_name_nothing(options: list[str], words: str) -> None:
    with pytest.raises(LabError, match=words):
        addresses(options)


def test_files_name_keys_and_never_hold_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "ca.pem").write_text("x")
    file = tmp_path / "servers.toml"
    file.write_text(
        '[baseline]\nurl = "gpu:1"\napi_key_env = "MINE"\n[bf16]\nurl = "https://gpu/v1"\napi_key_file = "key"\nca = "ca.pem"\n'
    )
    with pytest.raises(LabError, match="MINE is not set"):
        from_file(file)
    monkeypatch.setenv("MINE", "other")
    found = from_file(file)
    assert found == {
        "none": Address("http://gpu:1", "other"),
        "bf16": Address("https://gpu", KEY, str(tmp_path / "ca.pem")),
    }
    assert KEY not in repr(found)
    as_json = tmp_path / "servers.json"
    as_json.write_text('{"fp8": {"url": "gpu:2"}}')
    monkeypatch.setenv("EAGLE3_LAB_ATTACH", str(as_json))
    monkeypatch.setenv("VLLM_API_KEY", "shared")
    assert addresses() == {"fp8": Address("http://gpu:2", "shared")}
    monkeypatch.setenv("EAGLE3_LAB_ATTACH", "bf16=gpu:3, baseline=gpu:4")
    assert {*addresses()} == {"bf16", "none"}
    assert {*addresses(["fp8=gpu:5"])} == {"fp8"}  # the command line comes first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[bf16",
        b"\xff\xfe",
        b"[]",
        b"[bf16]\nurl = 3\n",
        b'bf16 = "gpu"\n',
        b'[bf16]\nurl = "gpu"\napi_key = "sk-secret-0123"\n',
        b'[bf16]\nurl = "gpu"\nca = "gone.pem"\n',
        b'[bf16]\nurl = "gpu"\napi_key_file = "gone"\n',
        b'[other]\nurl = "gpu"\n',
    ],
)
def test_files_that_do_not_work_are_explained(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "servers.toml"
    file.write_bytes(content)
    with pytest.raises(LabError) as caught:
        from_file(file)
    assert KEY not in str(caught.value)


def test_lanes_elsewhere_have_names_of_their_own() -> None:
    recipe, servers = chosen(None, ["bf16=gpu:1/p", "baseline=gpu:2"])
    assert (recipe.name, recipe.draft_choices(), {*servers}) == ("attached", ("bf16", "none"), {"http://gpu:1/p", "http://gpu:2"})
    lane = Lane(recipe, "bf16", 5)
    assert (lane.key, lane.label, lane.k) == ("attached/bf16/at/gpu:1/p", "Eagle3 BF16 at gpu:1/p", 0)
    with pytest.raises(LabError, match="--attach fp8=URL"):
        Lane(recipe, "fp8", 3)
    mixed, _ = chosen("kimi-k2.5", ["none=gpu:2"])
    assert Lane(mixed, "none").at == "http://gpu:2"
    assert Lane(mixed, "bf16", 4).at is None
    assert mixed.draft_choices() == ("none", "bf16", "fp8")
    assert chosen(None)[0] == recipes.get(recipes.DEFAULT)


# --- asking them


def test_key_and_prefix(fake: Any, proxy: Any) -> None:
    fake.key, fake.chunks = KEY, [*ANSWER, sse("[DONE]")]
    with pytest.raises(LabError, match="wants an API key"):
        remote.probe(address(proxy.url))
    with pytest.raises(LabError, match="refused the API key"):
        remote.probe(address(proxy.url, api_key="wrong"))
    found = remote.probe(address(f"{proxy.url}/v1", api_key=KEY))
    assert (found.url, found.model) == (proxy.url, "smollm2")
    assert "--scheduler-cls" in found.missing[0]
    assert KEY not in repr(found)
    asyncio.run(scrape(found))
    assert all(path.startswith("/team/a/") for path in proxy.paths)


def test_a_server_that_repeats_the_key_is_not_repeated(fake: Any, proxy: Any) -> None:
    fake.key, fake.status, fake.refusal = KEY, 400, {"error": {"message": f"bad request with Bearer {KEY}"}}

    async def check() -> None:
        where = address(proxy.url, api_key=KEY)
        lanes = Lanes(addresses={where.url: where})
        await asked(lanes, lane_of(where.url))

    with pytest.raises(LabError) as caught:
        asyncio.run(check())
    assert KEY not in str(caught.value)
    assert "Bearer ***" in str(caught.value)


@pytest.mark.parametrize("ending", ["\n", "\r\n", " "])
def test_a_key_from_a_file_may_end_in_a_line_break(fake: Any, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key = KEY
    monkeypatch.setenv("VLLM_API_KEY", KEY + ending)
    assert remote.probe(address(fake.url)).model == "smollm2"


@pytest.mark.parametrize("inside", ["\n", "\r", "é"])
def test_a_key_that_no_header_may_carry_is_refused_and_not_repeated(inside: str) -> None:
    with pytest.raises(LabError, match="no header may carry") as caught:
        address("http://gpu:8000", api_key=f"{KEY}{inside}more")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("prefix", ["/team/b", ""])
def test_a_wrong_prefix(proxy: Any, prefix: str) -> None:
    with pytest.raises(LabError, match="no OpenAI-style server"):
        remote.probe(address(proxy.url.removesuffix("/team/a") + prefix))


def test_own_certificates(fake: Any, tmp_path: Path) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout k.pem -out c.pem"
    )
    try:
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    with proxies.serving(proxies.Proxy(fake.url, "", context)) as made:
        with pytest.raises(LabError, match="is not trusted"):
            remote.probe(address(made.url))
        found = remote.probe(address(made.url, ca=str(tmp_path / "c.pem")))
        assert asyncio.run(scrape(found)).running == 0


def test_counts_of_a_server_without_the_plugin(fake: Any, proxy: Any) -> None:
    fake.chunks = COUNTED

    async def check() -> tuple[list[Any], Any]:
        return await asked(Lanes(), lane_of(proxy.url))

    events, request = asyncio.run(check())
    assert request.counted == ((3, 2), (3, 0), (3, 1))
    assert fake.bodies[-1]["logprobs"] is True
    notice = next(event.text for event in events if isinstance(event, Notice))
    assert notice.startswith("This server does not run the lab's plugin")
    shown = rebuilt(request)
    assert shown is not None
    assert [(step.draft, step.sampled) for step in shown.steps[1:]] == [
        ((11, 12, UNKNOWN), (11, 12, 13)),
        ((UNKNOWN,) * 3, (14,)),
        ((15, UNKNOWN, UNKNOWN), (15, 16)),
    ]
    assert tuple(token for step in shown.steps for token in step.sampled[: step.kept]) == request.ids
    assert bytes.fromhex(shown.pieces[12]) == b" 12"
    assert not request.steps  # what is saved is what was told


@pytest.mark.parametrize(
    ("accepted", "drafted", "fits"),
    [
        ([2, 0, 1], [3, 3, 3], True),
        ([2, 0, 3], [3, 3, 3], True),  # the stop cut the last step
        ([2, 0], [3, 3], False),  # a step is missing
        ([2, 0, 1, 0], [3, 3, 3, 3], False),  # one too many
        ([2, 3, 1], [3, 3, 3], False),
        ([4, 0, 0], [3, 3, 3], False),  # more accepted than drafted
        ([], [], False),
        ([2, 0], [3, 3, 3], False),
        (["2", 0, 1], [3, 3, 3], False),
    ],
)
def test_counts_colour_only_what_they_explain(fake: Any, accepted: list[Any], drafted: list[int], fits: bool) -> None:
    fake.chunks = [*ANSWER, usage(accepted, drafted), sse("[DONE]")]

    async def check() -> Any:
        return (await asked(Lanes(), lane_of(fake.url)))[1]

    request = asyncio.run(check())
    assert (rebuilt(request) is not None) == fits


def test_measured_requests_ask_for_nothing_that_costs(fake: Any) -> None:
    import dataclasses

    fake.chunks = COUNTED

    async def check() -> None:
        endpoint = dataclasses.replace(await Lanes().endpoint(lane_of(fake.url)), measured=True)
        async for _ in generate(endpoint, "hello"):
            pass

    asyncio.run(check())
    assert "logprobs" not in fake.bodies[-1]


# --- networks


def test_nobody_there_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(remote.wait.__kwdefaults__, "retry", 0.5)
    clock = itertools.count(0.0, 0.1)  # how long an attempt takes on this machine decides nothing
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _seconds: None))
    told: list[str] = []

    async def check() -> None:
        await Lanes().endpoint(lane_of("127.0.0.1:9"), on_progress=lambda progress: told.append(progress.detail))

    with pytest.raises(LabError, match=r"There is no OpenAI-style server at http://127\.0\.0\.1:9"):
        asyncio.run(check())
    assert any("does not answer" in line and "trying again" in line for line in told)


def test_a_server_that_comes_back_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "FRESH", 0.0)
    port = free_port()  # not one that the system hands to other programs' connections while nobody listens on it

    async def check() -> None:
        lanes, lane, told = Lanes(), lane_of(f"127.0.0.1:{port}"), list[str]()
        with proxies.serving(engines.Fake(port, "one")):
            assert (await lanes.endpoint(lane)).model == "one"
        with ExitStack() as stack:

            def hear(progress: Progress) -> None:
                if "does not answer" in progress.detail and not any("does not answer" in line for line in told):
                    stack.enter_context(proxies.serving(engines.Fake(port, "two")))
                told.append(progress.detail)

            endpoint = await lanes.endpoint(lane, on_progress=hear)
            assert endpoint.model == "two"
            assert any("does not answer" in line for line in told)
            assert any("serves another model now: two" in line for line in told)
            assert lanes.status()[0].memory is None

    asyncio.run(check())


def test_an_answer_that_is_cut_keeps_what_arrived(fake: Any, proxy: Any) -> None:
    fake.chunks = [ANSWER[0], 30.0]

    async def check() -> Any:
        endpoint = await Lanes().endpoint(lane_of(proxy.url))
        async for event in generate(endpoint, "hello"):
            if isinstance(event, Delta):
                proxy.cut()
            if isinstance(event, Done):
                return event.request
        return None

    request = asyncio.run(check())
    assert "stopped in the middle of the answer" in request.error
    assert request.ids == (10,)


def test_a_network_that_goes_silent_is_noticed(fake: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "QUIET", 0.2)
    monkeypatch.setattr(streaming, "CONNECT_TIMEOUT", 1.0)
    fake.chunks = [ANSWER[0], 1.0, ANSWER[1], 30.0]

    async def check() -> Any:
        endpoint = await Lanes().endpoint(lane_of(proxy.url))
        began = time.monotonic()
        async for event in generate(endpoint, "hello"):
            if isinstance(event, Delta) and 13 in event.ids:  # the second of silence before it was patiently waited for
                proxy.silent = True
            if isinstance(event, Done):
                return event.request, time.monotonic() - began
        return None

    request, took = asyncio.run(check())
    assert "silence" in request.error
    assert request.ids == (10, 11, 12, 13)
    assert took < 20


def test_counting_says_what_it_is() -> None:
    assert "plugin" in counted.SAID
    assert "nothing is coloured" in counted.UNFIT
