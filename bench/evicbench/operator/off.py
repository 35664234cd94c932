"""A server without ``--kv-policy``, its metrics on: nothing of ours is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from evicbench.report import Line
from evicbench.testbed.server import Server
from sglang_evicpress.asked_quality import KV_CACHE
from sglang_evicpress.introspect.operation import stable_path
from sglang_evicpress.introspect.operations import OPERATIONS
from sglang_evicpress.introspect.series import PREFIX

PROMPT = list(range(6, 206))
PAGES = (("GET", "/evicpress"), ("GET", "/evicpress/"), ("GET", "/evicpress/events"))


def measure() -> Iterator[Line]:
    asked = [*PAGES, *_routes()]
    with Server("--enable-metrics", "--enable-cache-report") as server:
        statuses = [server.request(method, path.replace("{", "").replace("}", ""))[0] for method, path in asked]
        described = [path for path in server.get("/openapi.json")["paths"] if "evicpress" in path]
        answers = [server.generate(PROMPT, 4)["meta_info"] for _ in range(2)]
        usages = [_usage(server, path) for path in ("/v1/completions", "/v1/chat/completions")]
        _, text = server.request("GET", "/metrics")
    fields = [name for answer in (*answers, *usages) for name in answer if KV_CACHE in name or "evicpress" in name]
    series = [line for line in str(text).splitlines() if PREFIX in line]
    are_others = "are" if "sglang:num_running_reqs" in str(text) else "are not"
    yield Line(
        f"a server without --kv-policy: {len(asked)} routes, series in /metrics, fields in answers, paths in OpenAPI",
        "404 for each route; no series, field or path of ours",
        f"{statuses.count(404)} of {len(asked)} 404; {len(series)} series, {len(fields)} fields, {len(described)} "
        f"paths; SGLang's own series {are_others} there",
        set(statuses) == {404} and not series and not fields and not described and are_others == "are",
    )


def _routes() -> Iterator[tuple[str, str]]:
    for each in OPERATIONS.values():
        if each.path:
            yield from ((each.method, path) for path in (each.path, stable_path(each.path)))


def _usage(server: Server, path: str) -> Mapping[str, object]:
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "k1 k2"}]} if "chat" in path else {"prompt": PROMPT}
    )
    answer = server.post(path, {"model": "default", "max_tokens": 2, **prompt})
    usage: Mapping[str, object] = answer["usage"]
    return usage
