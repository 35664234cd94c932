"""The page of a real server in a real browser: what it shows, whom it asks, its keys, and a tree of 50,000 nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evicbench.operator.browser import Browser, opened
from evicbench.operator.served import Users, watched_server
from evicbench.paths import OUT
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, Server

NUM_BEFORE = 120
PICTURE = 1180, 0.7
"""Height of a picture, in pixels of the page, and its scale."""

LARGE = 50_000
MOST_DRAW_MS = 500.0
LIVE = "document.getElementById('status').className === 'live' && state.stats && state.tiers && state.numNodes > 0"
SHOWN = {
    "hit share": "document.querySelector('#hits .big').textContent.includes('%')",
    "time to first token": "/ms|s/.test(document.querySelector('#ttft .big').textContent)",
    "quality": "document.querySelector('#quality .target') !== null",
    "three tiers": "document.querySelectorAll('#tiers .tier').length === 3",
    "tree": "document.querySelectorAll('#tree [role=treeitem]').length > 10",
    "decisions": "document.querySelectorAll('#decisions tr').length > 0",
    "curves": "document.querySelectorAll('#profile .ring').length > 0",
    "budgets": "document.querySelectorAll('#requests tbody tr').length > 0",
}
LARGE_TREE = """(() => {
  const rows = [];
  for (let id = 1; id <= %d; id += 1) {
    const random = (id * 2654435761 %% 4096) / 4096;
    const parent = id <= 200 ? null : 1 + Math.floor((id - 1) * random ** 2);
    rows.push([id, parent, 8 + id * 37 %% 300, 8, ["gpu", "host", "ssd"][id %% 3], "keydiff@0.5", 1, false]);
  }
  const begin = performance.now();
  takeTree(rows);
  document.getElementById("tree").getBoundingClientRect();
  const took = performance.now() - begin;
  return {took, nodes: state.nodes.size, drawn: document.querySelectorAll("#tree [role=treeitem]").length};
})()"""
NAMELESS = """[...document.querySelectorAll("button, input, [tabindex='0']")].filter((each) =>
  each.offsetParent !== null
  && !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length)).length"""


def measure() -> Iterator[Line]:
    with watched_server() as server:
        users = Users()
        users.ask(server, NUM_BEFORE)
        with asking(lambda: users.ask(server, 1)):
            yield from asyncio.run(_look(server))


@contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Users who go on asking during the block."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            ask()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def _look(server: Server) -> list[Line]:
    async with opened(f"{server.url}/evicpress/") as browser:
        await browser.wait_until("document.getElementById('keyDialog')?.open === true")
        asks_for_key = await browser.evaluate("document.getElementById('keyDialog').open")
        await browser.evaluate(f"document.getElementById('key').value = '{ADMIN_KEY}'")
        await browser.press("Enter")
        await browser.evaluate("document.getElementById('keyDialog').close('ok')")
        is_live = await browser.wait_until(LIVE)
        refused = [problem for problem in browser.problems if "401" in problem]
        browser.problems = [problem for problem in browser.problems if problem not in refused]
        lines = [_line("the page of a server with an admin key", "asks for it, then is live", asks_for_key and is_live)]
        lines.append(await _shown_line(browser))
        lines += await _key_lines(browser)
        for scheme in ("light", "dark"):
            await browser.set_scheme(scheme)
            await asyncio.sleep(0.5)
            await browser.save_picture(OUT / "operator" / f"page-{scheme}.png", *PICTURE)
        lines.append(await _large_line(browser))
        elsewhere = sorted({url for url in browser.requests if not url.startswith((server.url, "data:", "about:"))})
        asked = f"{len(browser.requests)} requests, elsewhere: {', '.join(elsewhere) or 'none'}"
        lines.append(Line("whom the page asks", "its own server alone", asked, not elsewhere))
        said = "; ".join(browser.problems) or "none"
        lines.append(Line("errors in the console of the browser", "none", said, not browser.problems))
        return lines


def _line(what: str, target: str, ok: bool) -> Line:
    return Line(what, target, "so" if ok else "not so", ok)


async def _shown_line(browser: Browser) -> Line:
    missing = [name for name, expression in SHOWN.items() if not await browser.wait_until(expression)]
    figure = f"{len(SHOWN) - len(missing)} of {len(SHOWN)}; missing: {', '.join(missing) or 'none'}"
    return Line(f"parts of the page with figures ({', '.join(SHOWN)})", "all", figure, not missing)


async def _key_lines(browser: Browser) -> list[Line]:
    await browser.evaluate("drawTree(); document.querySelector('#tree [tabindex=\"0\"]').focus()")
    begin = await browser.evaluate("state.shapes.indexOf(state.focused)")
    await browser.press("ArrowDown")
    moved = await browser.evaluate("state.shapes.indexOf(state.focused)") != begin
    await browser.press("Home")
    await browser.press("Enter")
    selected = await browser.wait_until("document.querySelector('#node dl') !== null")
    explained = await browser.evaluate("document.querySelectorAll('#node tbody tr').length")
    nameless = await browser.evaluate(NAMELESS)
    return [
        Line(
            "the tree by keyboard: arrows move, Enter shows the options of a node",
            "so",
            f"{'moves' if moved else 'does not move'}; {explained} rows of options and decisions",
            moved and selected and explained > 0,
        ),
        Line("controls without a name for screen readers", "0", str(nameless), nameless == 0),
    ]


async def _large_line(browser: Browser) -> Line:
    begin_s = await browser.processor_seconds()
    drawn = await browser.evaluate(LARGE_TREE % LARGE)
    took_ms = 1e3 * (await browser.processor_seconds() - begin_s)
    return Line(
        f"the page makes, lays out and draws {LARGE:,} nodes, small ones together, processor time",
        f"<= {MOST_DRAW_MS:.0f} ms",
        f"{took_ms:.0f} ms (wall {drawn['took']:.0f}), {drawn['drawn']} shapes for {drawn['nodes']:,} nodes",
        took_ms <= MOST_DRAW_MS and drawn["nodes"] == LARGE,
    )
