"""Which routes ask for the server's API key: those of vLLM's real app, as a server with the backend has them."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from installed_vllm import serve_parser

from fp8plan.runtime.apply.plugin import API_KEY, PULL, ROLLOUT, STATUS, authorization

pytestmark = pytest.mark.vllm

KEY = {"Authorization": "Bearer sesame"}
# What may be read without the key, as vLLM has it. A route that is new here must change nothing.
READ = {
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/is_paused",
    "/is_sleeping",
    "/weight_info",
    "/get_world_size",
    "/server_info",
    STATUS,
}
SOURCES = "/kv_event_sources"  # where events of the KV cache are published; 0.32 has it, 0.30 has not  # fmt: skip
CHANGES = {
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/pause",
    "/resume", "/abort_requests", "/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/invocations",
    "/update_weight_version", "/scale_elastic_ep", ROLLOUT, PULL,
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's app with all its routes, built as `vllm serve --api-key sesame` builds it; there is no engine."""
    from vllm.entrypoints.openai.api_server import build_app

    from fp8plan.runtime.apply.server.routes import Routes, keys_of

    args = serve_parser().parse_args(["--api-key", "sesame"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setattr("vllm.plugins.load_endpoint_plugins", lambda tasks: [Routes()])
        made = build_app(args, ("generate",))
    made.state.fp8plan_keys = keys_of(args)
    return made


def routes(app: Any) -> list[tuple[str, str]]:
    """Method and path of all that the app answers; a part that takes every method is asked by two."""
    return [
        (method, route.path.replace("{response_id}", "1"))
        for route in app.routes
        for method in (getattr(route, "methods", None) or ("GET", "POST"))
    ]


def client(app: Any) -> Any:
    from fastapi.testclient import TestClient

    return TestClient(app, raise_server_exceptions=False)


def test_every_route_that_does_more_than_read_asks_for_the_key(app: Any) -> None:
    asked, given = client(app), client(app)
    given.headers.update(KEY)
    seen = set()
    for method, path in routes(app):
        if method in ("GET", "HEAD"):
            continue
        seen.add(path)
        assert asked.request(method, path).status_code == 401, (method, path)
        assert asked.request(method, path, headers={"Authorization": "Bearer Sesame"}).status_code == 401
        assert given.request(method, path).status_code != 401, (method, path)  # it fails elsewhere: there is no engine
    assert seen >= CHANGES


def test_what_may_be_read_without_the_key_is_known(app: Any) -> None:
    reads = {path for method, path in routes(app) if method == "GET" and not path.startswith(("/v1", "/v2"))}
    assert reads - {SOURCES} == READ


@pytest.mark.parametrize("header", ["sesame", "Basic sesame", "Bearer", "Bearer sesame ", "bearer\tsesame", "Bearer é"])
def test_other_headers_are_no_key(app: Any, header: str) -> None:
    answer = client(app).post("/collective_rpc", headers={"Authorization": header.encode()})
    assert answer.status_code == 401


def test_a_refusal_says_what_to_type_and_is_logged(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.runtime.apply.server import routes as gate

    logged: list[str] = []
    monkeypatch.setattr(gate.logger, "warning", lambda text, *words: logged.append(text % words))
    answer = client(app).post("/init_weight_transfer_engine", json={"init_info": {}})
    assert answer.json() == {
        "error": "/init_weight_transfer_engine needs the API key of the server; type: -H 'Authorization: Bearer KEY'"
    }
    assert logged == [
        "fp8plan refused POST /init_weight_transfer_engine from testclient: it lacks the API key of the server"
    ]


def test_a_server_without_a_key_asks_for_none(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.runtime.apply.server.routes import keys_of

    monkeypatch.delenv(API_KEY, raising=False)
    assert keys_of(argparse.Namespace(api_key=None)) == ()
    monkeypatch.setattr(app.state, "fp8plan_keys", ())
    assert client(app).post("/sleep").status_code != 401


def test_keys_are_read_as_vllm_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.runtime.apply.server.routes import keys_of

    monkeypatch.setenv(API_KEY, "of the environment")
    assert keys_of(argparse.Namespace(api_key=None)) == (b"of the environment",)
    assert keys_of(argparse.Namespace(api_key=["a", "", "b"])) == (b"a", b"b")
    assert authorization() == {"Authorization": "Bearer of the environment"}
    assert authorization("mine") == {"Authorization": "Bearer mine"}
    monkeypatch.delenv(API_KEY)
    assert authorization() == {}


def test_resume_is_only_there_where_vllms_is() -> None:
    from fastapi import FastAPI

    from fp8plan.runtime.apply.server.routes import Routes

    Routes().attach_router(app := FastAPI())
    assert "/resume" not in {path for _, path in routes(app)}


def test_resume_in_an_open_update_is_the_callers_fault(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.runtime.apply.server.front import UpdateError

    async def refuse() -> None:
        raise UpdateError("an update of the weights is open")

    monkeypatch.setattr(app.state, "engine_client", SimpleNamespace(resume_generation=refuse), raising=False)
    answer = client(app).post("/resume", headers=KEY)
    assert (answer.status_code, answer.json()) == (400, {"error": "an update of the weights is open"})


def test_the_servers_own_client_gives_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's, for own loops: every call of the lifecycle."""
    from fp8plan.runtime.apply.plugin import weight_sync_client

    seen: list[tuple[str, Any]] = []

    def post(url: str, *, headers: Any, **_: Any) -> Any:
        seen.append((url, headers))
        return SimpleNamespace(ok=True)

    monkeypatch.setattr("requests.post", post)
    found = weight_sync_client("http://server/", "sesame")
    found.init_weight_transfer_engine({})
    found.start_weight_update()
    found.update_weights({})
    found.finish_weight_update("1")
    assert [url.removeprefix("http://server/") for url, _ in seen] == [
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
    ]  # fmt: skip
    assert all(headers == KEY for _, headers in seen)


@pytest.mark.parametrize(
    ("call", "body", "says"),
    [
        ("/start_weight_update", {"is_checkpoint": True}, "does not read the field 'is_checkpoint'; allowed: an empty"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format is False; allowed: true"),
        ("/start_weight_update", [1], "the body of /start_weight_update is [1]; allowed: an empty body"),
        ("/start_weight_update", b"{names", "the body of /start_weight_update is no JSON; allowed: an empty body"),
        ("/start_weight_update?step=3", None, "/start_weight_update does not read ?step=; allowed: an empty body"),
        ("/finish_weight_update", {"version": "7"}, "does not read the field 'version'; allowed: an empty body, {\"we"),
        ("/pause", {"mode": "keep"}, "/pause does not read the field 'mode'; allowed: no body, /pause?mode="),
        ("/pause?mod=keep", None, "/pause does not read ?mod=; allowed: no body, /pause?mode="),
        ("/resume", {"mode": "keep"}, "/resume does not read the field 'mode'"),
        (PULL, {"version": 3}, f"{PULL} does not read the field 'version'"),
    ],
    ids=str,
)
def test_a_call_with_something_that_nobody_reads_is_refused(app: Any, call: str, body: Any, says: str) -> None:
    """vLLM takes the default in its place: an update begins, or all requests are aborted."""
    asked = client(app)
    asked.headers.update(KEY)
    given = {"content": body} if isinstance(body, bytes | None) else {"json": body}
    answer = asked.post(call, **given)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("/start_weight_update", None),  # vLLM's client
        ("/start_weight_update", {}),  # TRL's
        ("/start_weight_update", {"is_checkpoint_format": True}),  # its AsyncGRPO's
        ("/finish_weight_update", {"weight_version": "step 7"}),
        ("/pause?mode=keep&clear_cache=false", None),
        ("/resume", None),
    ],
    ids=str,
)
def test_what_clients_send_passes(app: Any, call: str, body: Any) -> None:
    called: list[tuple[Any, ...]] = []

    class Called:
        def __getattr__(self, name: str) -> Any:
            async def note(*args: Any, **more: Any) -> None:
                called.append((name, *args, *more.values()))

            return note

    app.state.engine_client = Called()
    try:
        asked = client(app)
        asked.headers.update(KEY)
        answer = asked.post(call, **({} if body is None else {"json": body}))
    finally:
        del app.state.engine_client
    assert answer.status_code == 200, answer.text
    assert len(called) == 1
    # vLLM 0.30 gives /pause's method a third argument.
    assert called[0][1:3] == {"/pause?mode=keep&clear_cache=false": ("keep", False)}.get(
        call, ("step 7",) if body == {"weight_version": "step 7"} else ()
    )


def test_health_says_whether_the_weights_may_be_used(app: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async def dead() -> None:
        raise EngineDeadError

    async def alive() -> None: ...

    found = []
    for refusal, check in ((None, alive), ("an update of the weights is open", alive), ("it has died", dead)):
        app.state.engine_client = SimpleNamespace(check_health=check)
        app.state.fp8plan = SimpleNamespace(refusal=refusal)
        answer = client(app).get("/health")
        found.append((answer.status_code, answer.json()))
    del app.state.engine_client, app.state.fp8plan
    assert found == [
        (200, {"serving": True, "refusal": None}),
        (200, {"serving": False, "refusal": "an update of the weights is open"}),
        (503, {"serving": False, "refusal": "it has died"}),
    ]


def test_the_client_of_an_own_loop_says_what_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    from fp8plan.errors import SyncError
    from fp8plan.runtime.apply.plugin import weight_sync_client

    answers: list[Any] = [
        SimpleNamespace(ok=True),
        SimpleNamespace(ok=False, status_code=400, text="missing: lm_head; the old weights serve"),
        requests.ConnectionError("refused"),
    ]

    def post(*_: Any, **__: Any) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(requests, "post", post)
    client = weight_sync_client("http://server", "sesame")
    client.start_weight_update()
    with pytest.raises(SyncError, match=r"^http://server/finish_weight_update answers 400: missing: lm_head; the old"):
        client.finish_weight_update()
    with pytest.raises(SyncError, match=r"^http://server/start_weight_update does not answer: refused; look whether"):
        client.start_weight_update()
