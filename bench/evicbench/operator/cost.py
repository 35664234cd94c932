"""Processor time of ten pages and a Prometheus beside that of the server they look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import psutil

from evicbench.operator.page import asking
from evicbench.operator.served import Users, watched_server
from evicbench.report import Line
from evicbench.testbed.server import ADMIN_KEY, Server

NUM_CLIENTS = 10
SECONDS = 30.0
SCRAPE_S = 15.0
MOST_SHARE = 0.01
PUBLISH_MS = 5.0


def measure(seconds: float = SECONDS) -> Iterator[Line]:
    with watched_server() as server:
        users = Users()
        users.ask(server, 60)
        time.sleep(5.0)  # what the tiers do is done
        idle = _cpu_share(server, seconds)
        listened = asyncio.run(_cpu_share_with_listeners(server, seconds))
        with asking(lambda: users.ask(server, 1)):
            busy = _cpu_share(server, seconds)
    extra = listened - idle
    yield Line(
        f"processor time of {NUM_CLIENTS} listeners and a scrape every {SCRAPE_S:g} s, of that of the busy server",
        f"<= {MOST_SHARE:.0%}",
        f"{extra / busy:.2%}: {1e3 * extra:.1f} ms/s of {1e3 * busy:.0f} (idle {1e3 * idle:.1f})",
        extra <= MOST_SHARE * busy,
    )


def _cpu_seconds(server: Server) -> float:
    """CPU seconds of all processes of the server."""
    first = psutil.Process(server.pid)
    return sum(sum(each.cpu_times()[:2]) for each in (first, *first.children(recursive=True)))


def _cpu_share(server: Server, seconds: float) -> float:
    """Processor seconds per second."""
    begin, cpu_s = time.monotonic(), _cpu_seconds(server)
    time.sleep(seconds)
    return (_cpu_seconds(server) - cpu_s) / (time.monotonic() - begin)


async def _cpu_share_with_listeners(server: Server, seconds: float) -> float:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(_listen(session, server)) for _ in range(NUM_CLIENTS)]
        tasks.append(asyncio.create_task(_scrape(session, server)))
        await asyncio.sleep(3.0)
        share = await asyncio.to_thread(_cpu_share, server, seconds)
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(tasks)} listeners did not last: {failed[0].exception()!r}")
        return share


async def _listen(session: aiohttp.ClientSession, server: Server) -> None:
    async with session.get(f"{server.url}/evicpress/events") as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def _scrape(session: aiohttp.ClientSession, server: Server) -> None:
    while True:
        async with session.get(f"{server.url}/metrics") as response:
            await response.read()
        await asyncio.sleep(SCRAPE_S)
