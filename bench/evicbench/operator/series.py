"""Series of a real server: all of them are exported, with the figures of the endpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from evicbench.operator.served import Users, watched_server
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server
from sglang_evicpress.introspect.series import PREFIX, SERIES

NUM_REQUESTS = 200
SETTLED_S = 2.5  # the last figures are published and read by then
ONLY_WITH_ERRORS = {"move_errors_total", "tier_errors_total"}

_SAMPLE = re.compile(r"^([\w:]+)({[^}]*})? (\S+)$")


def measure(num_requests: int = NUM_REQUESTS) -> Iterator[Line]:
    with watched_server() as server:
        Users().ask(server, num_requests)
        time.sleep(SETTLED_S)
        samples = read_samples(server)
        yield _exported_line(samples)
        yield _equal_line(samples, server)
    with Server("--kv-policy", "evicpress", *GUESSED, "--max-total-tokens", "4000") as server:
        Users().ask(server, 2)
        status, _ = server.request("GET", "/metrics")
        yield Line("a policy without --enable-metrics: GET /metrics", "not served (404)", f"{status}", status == 404)


def read_samples(server: Server) -> dict[str, dict[str, float]]:
    """Values by name and labels, as text."""
    _, text = server.request("GET", "/metrics")
    samples: dict[str, dict[str, float]] = {}
    for line in str(text).splitlines():
        if match := _SAMPLE.match(line):
            samples.setdefault(match[1], {})[match[2] or ""] = float(match[3])
    return samples


def _exported_line(samples: Mapping[str, object]) -> Line:
    wanted = {series.name for series in SERIES} - ONLY_WITH_ERRORS
    missing = sorted(name for name in wanted if PREFIX + name not in samples)
    return Line(
        "series in /metrics of a server with tiers, a quality target and budgets",
        f"all {len(wanted)} but those of errors that never were",
        f"{len(wanted) - len(missing)}; missing: {', '.join(missing) or 'none'}",
        not missing,
    )


def _equal_line(samples: Mapping[str, Mapping[str, float]], server: Server) -> Line:
    stats, tiers = server.get("/evicpress/stats"), server.get("/evicpress/tiers")
    served = {(tier, form): num for tier, forms in stats["served"]["tokens"].items() for form, num in forms.items()}
    pairs = [
        ("nodes", {"": stats["num_nodes"]}),
        ("requests_total", {"": stats["admission"]["requests"]}),
        ("freed_slots_total", {"": stats["decisions"]["freed_slots"]}),
        ("tier_used_bytes", {f'tier="{tier}"': each["used_bytes"] for tier, each in tiers["tiers"].items()}),
        ("hit_tokens_total", {f'form="{form}",;tier="{tier}"': num for (tier, form), num in served.items()}),
    ]
    wrong = [
        f"{name} {labels}: {value:g}"
        for name, values in pairs
        for labels, value in values.items()
        if _value(samples.get(PREFIX + name, {}), labels.split(";")) != value
    ]
    count = sum(len(values) for _, values in pairs)
    return Line(
        "values of these beside /evicpress/stats and /evicpress/tiers of the idle server",
        "equal",
        f"{count - len(wrong)} of {count} equal {'; '.join(wrong)}",
        not wrong,
    )


def _value(values: Mapping[str, float], parts: list[str]) -> float | None:
    found = [value for labels, value in values.items() if all(part in labels for part in parts)]
    return found[0] if len(found) == 1 else None
