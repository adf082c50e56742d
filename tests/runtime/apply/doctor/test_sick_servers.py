"""The doctor at servers that are sick: what it says is one line, and it comes in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sick_server import INFO, METRICS, PAGES, Answer, completion, raw, serving, whole

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.doctor.doctor import Diagnosis
from fp8plan.runtime.apply.doctor.over_http import client

KEY = "s3cret-Key_1"
HEAD = b"HTTP/1.1 200 OK\r\n"
READ = ("/v1/models", "/version", "/metrics", "/server_info", "/fp8plan/status", "/v1/completions")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in client.KEYS:
        monkeypatch.delenv(name, raising=False)


def looked(sick: dict[str, Answer], **more: Any) -> Diagnosis:
    with serving(sick) as url:
        return fp8plan.doctor(url, gpu="h200", **more)


def told(sick: dict[str, Answer], **more: Any) -> str:
    """The line of the refusal."""
    with pytest.raises(ConfigError) as raised:
        looked(sick, **more)
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


def states(found: Diagnosis) -> dict[str, str]:
    return {one.check: one.state.value for one in found.findings}


def test_a_healthy_server_has_no_fault() -> None:
    found = looked({})
    assert found.faults == ()
    assert states(found)["decode"] == states(found)["preemption"] == states(found)["cuda_graphs"] == "ok"


def finding(found: Diagnosis, check: str) -> tuple[str, str]:
    (one,) = [one for one in found.findings if one.check == check]
    return one.state.value, one.says


def test_a_server_of_another_precision_is_a_fault_by_its_own_pages() -> None:
    says = "weights are not quantised, KV cache auto; planned: fp8_block+fp8_kv"
    assert finding(looked({}, precision="fp8_block+fp8_kv"), "precision") == ("fault", says)
    assert finding(looked({}, precision="bf16"), "precision") == ("ok", "weights are not quantised, KV cache auto")


def test_a_precision_that_no_page_tells_is_unknown() -> None:
    """Without VLLM_SERVER_DEV_MODE, and with a KV cache as it was planned."""
    fp8 = METRICS.replace('cache_dtype="auto"', 'cache_dtype="fp8"').encode()
    closed = {"/server_info": whole(b"Not Found", 404), "/metrics": whole(fp8)}
    found = looked(closed, precision="fp8_block+fp8_kv")
    assert finding(found, "precision") == ("unknown", "KV cache fp8; weights are not told")
    assert found.faults == ()
    (todo,) = {one.todo for one in found.findings if one.check == "precision"}
    assert todo is not None
    assert "VLLM_SERVER_DEV_MODE=1" in todo


@pytest.mark.parametrize(
    ("status", "says", "todo"),
    [
        ({"paused": True}, "generation is paused", "curl -X POST {}/resume"),
        ({"asleep": ["kv_cache"]}, "kv_cache sleep", "curl -X POST {}/wake_up"),
        ({"refusal": "an update of the weights is open for 9 s"}, "an update of the weights is open for 9 s", None),
    ],
)
def test_a_server_that_would_let_requests_wait_is_not_asked_to_generate(
    status: dict[str, Any], says: str, todo: str | None
) -> None:
    pages = {"/fp8plan/status": whole(json.dumps(status).encode()), "/v1/completions": whole(b"asked", 500)}
    with serving(pages) as url:
        found = fp8plan.doctor(url, gpu="h200")
    assert finding(found, "version") == ("fault", f"the engine refuses to generate: {says}")
    assert finding(found, "decode")[0] == "unknown"
    if todo is not None:
        assert found.faults[0].todo == todo.format(url)


def test_prompts_that_are_no_token_ids_are_refused_before_they_are_sent() -> None:
    with serving({}) as url:
        for prompts in ([[True]], [[1, 2.5]], [["1"]], [[-1]]):
            with pytest.raises(ConfigError, match=r"prompts: prompt 0, token .*; allowed: "):
                fp8plan.doctor(url, gpu="h200", prompts=prompts)  # type: ignore[arg-type]


BROKEN: dict[str, bytes] = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "an endless line": b"HTTP/1.1 200 " + b"a" * 100_000,
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "many headers": HEAD + b"".join(b"X-%d: 1\r\n" % n for n in range(200)) + b"\r\n",
    "a header that breaks off": HEAD + b"Content-Le",
    "a short body": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "a length of letters": HEAD + b"Content-Length: many\r\n\r\n{",
    "chunks that break off": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "chunks of letters": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "bytes": HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\x00\x80",
    "colours": HEAD + b'Content-Length: 9\r\n\r\n"\x1b[31m"\r\n',
}


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/v1/completions"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_an_answer_that_is_broken_ends_the_look(path: str, content: bytes) -> None:
    assert path in told({path: raw(content)})


@pytest.mark.parametrize("location", ["/v1/models", "file:///etc/passwd", "ftp://127.0.0.1:9/v1/models", "http://"])
def test_a_redirect_that_goes_nowhere(location: str) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    assert "/v1/models" in told({"/v1/models": raw(head.encode())})


@pytest.mark.parametrize("name", ["no HTTP", "nothing", "a short body", "chunks that break off", "bytes"])
def test_metrics_that_break_off_end_the_look(name: str) -> None:
    assert "/metrics" in told({"/metrics": raw(BROKEN[name])})


SHAPES: dict[str, bytes] = {
    "deep": b"[" * 100_000,
    "deep and whole": b'{"data":' * 5000 + b"1" + b"}" * 5000,
    "deep enough to be read": b"[" * 600 + b"]" * 600,
    "HTML": b"<html><body>It works!</body></html>",
    "a number": b"5",
    "a list": b"[1, 2]",
    "text": b'"on"',
    "half a character": b'{"data": [{"id": "\\ud800"}], "vllm_config": "\\ud800", "choices": "\\ud800"}',
}


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/server_info", "/fp8plan/status", "/v1/completions"])
@pytest.mark.parametrize("content", SHAPES.values(), ids=SHAPES)
def test_another_shape_of_json_ends_the_look(path: str, content: bytes) -> None:
    assert "is not what a vllm serve answers" in told({path: whole(content)})


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "lots", "1e400"])
def test_a_counter_that_counts_nothing(value: str) -> None:
    page = METRICS.replace("3.0", value)
    assert f"/metrics has vllm:num_preemptions_total {value}; allowed: a count" in told(
        {"/metrics": whole(page.encode())}
    )


def test_a_page_without_counters_is_unknown_with_its_reason() -> None:
    found = looked({"/metrics": whole(b"# nothing\n")})
    (finding,) = [one for one in found.findings if one.check == "preemption"]
    assert (finding.state.value, finding.says) == ("unknown", "/metrics has no vllm:num_preemptions_total")


SINCE = "since the engine's start were in the prefix cache"


@pytest.mark.parametrize(
    ("changes", "state", "says"),
    [
        ({}, "ok", f"75.0% of 200,000 tokens {SINCE}"),
        ({"150000": "1000"}, "warning", f"0.5% of 200,000 tokens {SINCE}; turns and samples of one prompt would hit"),
        ({"150000": "500", "200000": "99999"}, "ok", f"0.5% of 99,999 tokens {SINCE}"),
        ({"200000": "0"}, "unknown", "no prompt was looked up since the engine's start"),
        ({"prefix_cache_queries": "queries"}, "unknown", "/metrics has no vllm:prefix_cache_queries_total"),
    ],
)
def test_the_hits_of_a_servers_prefix_cache_are_read(changes: dict[str, str], state: str, says: str) -> None:
    page = METRICS
    for before, after in changes.items():
        page = page.replace(before, after)
    assert finding(looked({"/metrics": whole(page.encode())}), "prefix_hits") == (state, says)


def test_a_server_without_a_prefix_cache_is_named() -> None:
    page = METRICS.replace('caching="True"', 'caching="False"')
    (named,) = [one for one in looked({"/metrics": whole(page.encode())}).findings if one.check == "prefix_hits"]
    assert (named.state.value, named.fault) == ("warning", "prefix_caching_off")
    assert named.todo == "enable_prefix_caching=True; vllm serve: --enable-prefix-caching"


def test_pages_that_a_server_does_not_have_hide_nothing() -> None:
    missing = {
        path: whole(b"no", status) for path, status in (("/metrics", 404), ("/server_info", 405), ("/version", 503))
    }
    found = looked(missing)
    assert states(found)["decode"] == "ok"
    assert states(found)["preemption"] == states(found)["cuda_graphs"] == "unknown"


def test_a_server_that_fails_to_generate_is_a_fault() -> None:
    """NaN among log-probs is one: vLLM cannot write it as JSON, and answers 500."""
    (fault,) = looked({"/v1/completions": whole(b"Internal Server Error", 500)}).faults
    assert fault.fault == "not_serving"
    assert "/v1/completions answers 500: Internal Server Error" in fault.says


def test_log_probs_that_are_null_are_a_fault() -> None:
    def answer(handler: Any) -> None:
        whole(json.dumps(completion(handler.asked)).replace("-1.0", "null").encode())(handler)

    (fault,) = looked({"/v1/completions": answer}).faults
    assert fault.fault == "decode_differs"
    assert "NaN" in fault.says


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": None, "logprobs": {"top_logprobs": []}},
        {"token_ids": [], "logprobs": {"top_logprobs": []}},
        {"token_ids": [7, 7], "logprobs": {"top_logprobs": [{"token_id:7": -1.0}]}},
        {"token_ids": [7], "logprobs": None},
        {"token_ids": [7], "logprobs": {"top_logprobs": [{"the": -1.0}]}},
        {"token_ids": [7], "logprobs": {"top_logprobs": [{"token_id:8": -1.0}]}},
    ],
)
def test_completions_that_lack_what_was_asked_for_leave_checks_unknown(choice: dict[str, Any]) -> None:
    found = looked({"/v1/completions": whole(json.dumps({"choices": [choice]}).encode())})
    (finding,) = [one for one in found.findings if one.check == "decode"]
    assert finding.state.value == "unknown"
    assert "/v1/completions" in finding.says


def drips(content: bytes, seconds: float = 0.05) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        for byte in content:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(seconds)

    return answer


def floods(content: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        while True:
            handler.wfile.write(content)

    return answer


LATE: dict[str, Answer] = {
    "a byte at a time of headers": drips(HEAD + b"X: " + b"a" * 4000),
    "a byte at a time of a body": drips(HEAD + b"Content-Length: 4000\r\n\r\n" + b" " * 4000),
    "a byte at a time of chunks": drips(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1000),
    "silence": lambda handler: time.sleep(6),
    "endless promises": floods(b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("answer", LATE.values(), ids=LATE)
def test_a_server_has_a_deadline(path: str, answer: Answer) -> None:
    begun = time.monotonic()
    text = told({path: answer}, timeout_s=0.8)
    assert time.monotonic() - begun < 5
    assert " does not answer within 0.8 s; type: --timeout SECONDS" in text


def test_the_deadline_is_that_of_all_questions() -> None:
    """Each answer is in time; together they are not."""
    slow = dict.fromkeys(["/v1/models", "/version", "/server_info"], drips(HEAD + b"Content-Length: 2\r\n\r\n{}", 0.01))
    slow["/v1/models"] = drips(HEAD + b"Content-Length: 23\r\n\r\n" + b'{"data": [{"id": "m"}]}', 0.01)
    assert "within 1 s" in told(slow, timeout_s=1.0)


def test_a_page_waits_less_than_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_S", 0.3)
    text = told({"/v1/models": lambda handler: time.sleep(1.0)}, timeout_s=60)
    assert "does not answer within 0.3 s; give the URL" in text


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 16)
    assert "more than 65536 bytes" in told({"/metrics": raw(HEAD + b"\r\n" + b"a" * (1 << 17))})


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "10", None])
def test_a_timeout_is_a_time(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s is .*; allowed: seconds above 0"):
        fp8plan.doctor("http://127.0.0.1:9", timeout_s=timeout_s)


@contextmanager
def asking_for_a_key() -> Iterator[str]:
    with serving({}, KEY) as url:
        yield url


def test_a_key_is_asked_for_by_name() -> None:
    with asking_for_a_key() as url, pytest.raises(ConfigError) as raised:
        fp8plan.doctor(url)
    assert str(raised.value).endswith("; type: --api-key KEY, or export VLLM_API_KEY=KEY")


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "OPENAI_API_KEY"])
def test_a_key_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"{KEY}\n")  # as a secret's file has it
    with asking_for_a_key() as url:
        assert fp8plan.doctor(url, gpu="h200").faults == ()


def test_a_key_that_is_given_comes_first_and_vllms_own_before_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with asking_for_a_key() as url:
        assert fp8plan.doctor(url, gpu="h200").faults == ()
        monkeypatch.setenv("VLLM_API_KEY", "a third")
        assert fp8plan.doctor(url, gpu="h200", api_key=KEY).faults == ()


@pytest.mark.parametrize("key", ["clé", "two\nlines", "bell\a"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="the API key holds characters") as raised:
        fp8plan.doctor("http://127.0.0.1:9", api_key=key)
    assert key not in str(raised.value)


def test_a_redirect_is_not_followed() -> None:
    """The key must not go to another server."""
    keys: list[str | None] = []

    def another(handler: BaseHTTPRequestHandler) -> None:
        keys.append(handler.headers["Authorization"])

    with serving({"/v1/models": another}) as other:
        moved = raw(f"HTTP/1.1 302 Found\r\nLocation: {other}/v1/models\r\nContent-Length: 0\r\n\r\n".encode())
        text = told({"/v1/models": moved}, api_key=KEY)
    assert "answers 302" in text
    assert f"give the URL that it sends to: {other}/v1/models" in text
    assert keys == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each part of a JSON value, itself included."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def planted(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """The value with something odd at one place."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = planted(value[path[0]], path[1:], odd)
    return copy


FACTS = {"layers": {"Linear / Fp8PerBlockOnlineLinearMethod": 3}, "kernels": {"gemm": "K"}, "e8m0": False,
         "kv_cache_dtype": "fp8", "device": "cpu", "routers": {}, "weights": 1}  # fmt: skip
WHOLE: dict[str, Any] = {
    "/v1/models": PAGES["/v1/models"],
    "/version": PAGES["/version"],
    "/server_info": INFO,
    "/fp8plan/status": {
        "precision": "fp8_block", "facts": FACTS, "refusal": None, "weights": {"version": 1, "name": None},
        "kv_scales": {"source": "measured", "scales": {"layers.0": {"q": 1.0, "k": 0.1, "v": 0.1, "k_host": 0.1}}},
    },
    "/v1/completions": completion({"max_tokens": 1, "prompt": [1, 2], "prompt_logprobs": 0}),
}  # fmt: skip


def line_or_diagnosis(sick: dict[str, Answer]) -> str:
    """The doctor's diagnosis, joined into one line, or its refusal, which is one line already."""
    with serving(sick) as url:
        try:
            found = fp8plan.doctor(url, gpu="h200")
        except ConfigError as error:
            return str(error)
    json.dumps(found.to_dict(), allow_nan=False)
    return str(found).replace("\n", " ")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), path=st.sampled_from(sorted(WHOLE)), odd=JSON)
def test_any_json_at_any_place(data: st.DataObject, path: str, odd: Any) -> None:
    place = data.draw(st.sampled_from(list(places(WHOLE[path]))))
    assert line_or_diagnosis({path: whole(json.dumps(planted(WHOLE[path], place, odd)).encode())}).isprintable()


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=60), path=st.sampled_from(READ), head=st.sampled_from([b"", HEAD, HEAD + b"\r\n"]))
def test_any_bytes(content: bytes, path: str, head: bytes) -> None:
    assert line_or_diagnosis({path: raw(head + content)}).isprintable()
