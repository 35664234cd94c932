"""Headless Chromium (Debian package ``chromium``), asked by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

START_S, ANSWER_S = 30.0, 60.0
SIZE = 1440, 1300
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    "--hide-scrollbars",
)


class Browser:
    """One tab. ``requests`` are the addresses it asked for, ``problems`` what its console called an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command of the protocol. Raises RuntimeError for one that is refused."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        answer = await asyncio.wait_for(waiting, ANSWER_S)
        del self._waiting[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """Value of an expression in the page; promises are awaited. Raises RuntimeError for what it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression:.200}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def wait_until(self, expression: str, seconds: float = 20.0) -> bool:
        """True once the expression is; False if it is not within so many seconds."""
        for _ in range(int(seconds / 0.2)):
            if await self.evaluate(expression):
                return True
            await asyncio.sleep(0.2)
        return False

    async def processor_seconds(self) -> float:
        """Time that the thread of the page has worked."""
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    async def press(self, key: str) -> None:
        """A key, as the user presses it."""
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else ""
            )

    async def set_scheme(self, scheme: str) -> None:
        """``light`` or ``dark`` colours."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def save_picture(self, path: Path, most_height: int = 100_000, scale: float = 1.0) -> None:
        """The page as a PNG: as much of it from the top, at this scale."""
        metrics = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(metrics["height"], most_height)
        clip = {"x": 0, "y": 0, "width": metrics["width"], "height": height, "scale": scale}
        shot = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                waiting = self._waiting.get(told["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
            elif told["method"] == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description", details["text"]))[:300])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(str(told["params"]["entry"]["text"])[:300])


@asynccontextmanager
async def opened(url: str, scheme: str = "light") -> AsyncIterator[Browser]:
    """A tab with the page. Raises RuntimeError where there is no Chromium, or it does not start."""
    program = shutil.which("chromium")
    if program is None:
        raise RuntimeError("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(program, *_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            address = await asyncio.wait_for(_address_of(process), START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json/list") as response:
                    tabs = await response.json()
                tab = next(each for each in tabs if each["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    browser = Browser(socket)
                    await _load(browser, url, scheme)
                    yield browser
                    await browser.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address_of(process: asyncio.subprocess.Process) -> str:
    if process.stderr is None:
        raise RuntimeError("chromium has no output")
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return line.decode().partition("ws://")[2].partition("/")[0]
    raise RuntimeError("chromium ended while it started")


async def _load(browser: Browser, url: str, scheme: str) -> None:
    for domain in ("Page", "Runtime", "Network", "Log"):
        await browser.call(f"{domain}.enable")
    await browser.call("Performance.enable", timeDomain="threadTicks")
    width, height = SIZE
    await browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
    await browser.set_scheme(scheme)
    await browser.call("Page.navigate", url=url)
