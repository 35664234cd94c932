"""Alert rules and queries against a real Prometheus (Debian package ``prometheus``) that scrapes a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from evicbench.operator.served import Users, watched_server
from evicbench.paths import ROOT
from evicbench.report import Line
from evicbench.testbed.server import Server, free_port

MONITORING = ROOT / "docs" / "monitoring"
SCRAPED_S = 40.0
RATE = "20s"
START_S = 30.0
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: sglang
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def measure() -> Iterator[Line]:
    for program in ("promtool", "prometheus"):
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is not installed: apt-get install prometheus")
    rules = MONITORING / "alerts.yaml"
    checked = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    said = (checked.stdout + checked.stderr).strip().splitlines()[-1].strip()
    yield Line(
        "promtool check rules docs/monitoring/alerts.yaml",
        "status 0",
        f"{checked.returncode}: {said}",
        checked.returncode == 0,
    )
    with watched_server() as server, scraping(server, rules) as prometheus:
        users, end_s = Users(), time.monotonic() + SCRAPED_S
        while time.monotonic() < end_s:
            users.ask(server, 5)
        yield _queries_line(prometheus)
        yield _alerts_line(prometheus)


@contextmanager
def scraping(server: Server, rules: Path) -> Iterator[httpx.Client]:
    """The API of a Prometheus that scrapes the server every second; it ends with the block."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(CONFIG.format(rules=json.dumps(str(rules)), port=server.port), encoding="utf-8")
        command = [
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                _wait_until_ready(client)
                yield client
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"prometheus was not ready within {START_S:g} s")
        time.sleep(0.2)


def queries() -> dict[str, str]:
    """Queries of the dashboard by panel, with its variables filled in."""
    panels = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", RATE)
        .replace("$model", ".*")
        for panel in panels
        for target in panel.get("targets", ())
    }


def _queries_line(prometheus: httpx.Client) -> Line:
    asked, empty = queries(), []
    for name, expression in asked.items():
        answer: dict[str, Any] = prometheus.get("/api/v1/query", params={"query": expression}).json()
        values = [float(each["value"][1]) for each in answer.get("data", {}).get("result", ())]
        if answer["status"] != "success" or not values or all(value != value for value in values):
            empty.append(f"{name} ({answer.get('error', 'no data')})")
    return Line(
        f"queries of docs/monitoring/grafana.json after {SCRAPED_S:g} s of traffic",
        "each returns data",
        f"{len(asked) - len(empty)} of {len(asked)}; without: {', '.join(empty) or 'none'}",
        not empty,
    )


def _alerts_line(prometheus: httpx.Client) -> Line:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    bad = [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    return Line(
        "alert rules, evaluated on that traffic",
        "every one evaluates, none fires",
        f"{len(rules) - len(bad)} of {len(rules)} evaluate {'; '.join(bad)}; firing: {', '.join(firing) or 'none'}",
        bool(rules) and not bad and not firing,
    )
