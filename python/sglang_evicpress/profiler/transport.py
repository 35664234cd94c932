"""Transport of requests to a server, and its refusals as errors; ``HttpTransport`` sends them over the network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import orjson

from sglang_evicpress.profiler.engine import EngineError, ShadowLost, ShadowRefused

Json = dict[str, Any]


class BadRequest(EngineError):
    """The server accepts no such value (status 400)."""


class Conflict(EngineError):
    """The server cannot do that as things are (status 409)."""


class NotThere(EngineError):
    """The server knows no such route, shadow or profile (status 404)."""


class Unreachable(EngineError):
    """No server answered."""


def refusal(status: int, reason: str, where: str) -> EngineError:
    """Error for an answer of ``status`` to the request ``where``, such as ``POST http://...``.

    Of 409, the first words of the server's ``reason`` tell what it means: "no room" that later there may be some,
    "the shadow is gone" that it is.
    """
    kinds: dict[int, type[EngineError]] = {400: BadRequest, 404: NotThere, 409: Conflict}
    kind = kinds.get(status, EngineError)
    if status == 409 and reason.startswith("no room"):
        kind = ShadowRefused
    elif status == 409 and reason.startswith("the shadow is gone"):
        kind = ShadowLost
    return kind(f"{where}: status {status}: {reason}")


_TOTALS = tuple(f"/evicpress/{path}" for path in ("stats", "tiers", "v1/stats", "v1/tiers"))  # for every user


def is_server_url(url: str) -> bool:
    """True for http:// or https:// and a host, without a user name."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        return False


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def check_key(key: str | None) -> None:
    """Raise ValueError, one sentence, for an API key that no header can carry."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError("the API key has characters that no header can carry: expected printable ASCII")


class Transport(Protocol):
    """Carries requests to a server. Both raise EngineError: for a refused one, what ``refusal`` makes."""

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        """The JSON object that ``method path`` answers."""

    def generate(self, body: Mapping[str, object]) -> list[Json]:
        """Answer of ``POST /generate`` to a batch: one object per prompt, in their order."""


class HttpTransport:
    """Sends requests to ``url``, such as ``http://127.0.0.1:30000``, with ``api_key`` as the bearer token; with
    ``admin_api_key``, where there is one, those to look into the cache or change it: SGLang wants it for them then.

    A shadow for which there is no room is asked for ``num_retries`` times more, after ``wait_s`` seconds and then
    twice as long each time. Raises ValueError for a URL of another kind.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 600.0,
        num_retries: int = 0,
        wait_s: float = 2.0,
    ) -> None:
        if not is_server_url(url) or set(url) & {"?", "#"}:
            raise ValueError(f"URL {url!r}: expected one of a server, such as http://127.0.0.1:30000")
        for key in (api_key, admin_api_key):
            check_key(key)
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._wait_s = wait_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Follows no redirect, and asks this machine by no proxy: keys and texts stay here.
        self._client = httpx.Client(timeout=timeout_s, limits=limits, trust_env=not _is_loopback(url))

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        wait_s = self._wait_s
        for _ in range(self._num_retries):
            try:
                return self._object(method, path, body)
            except ShadowRefused:
                time.sleep(wait_s)
                wait_s *= 2.0
        return self._object(method, path, body)

    def generate(self, body: Mapping[str, object]) -> list[Json]:
        answer = self._send("POST", "/generate", body)
        if not isinstance(answer, list) or not all(isinstance(result, dict) for result in answer):
            raise EngineError(f"POST {self.url}/generate answered {answer!r:.100}: expected a list of objects")
        return answer

    def _object(self, method: str, path: str, body: Mapping[str, object] | None) -> Json:
        answer = self._send(method, path, body)
        if not isinstance(answer, dict):
            raise EngineError(f"{method} {self.url}{path} answered {answer!r:.100}: expected an object")
        return answer

    def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        where = f"{method} {self.url}{path}"
        # Closed by what is said: a pool that keeps none may still give one to two threads, and close it for both.
        headers = {"Accept": "application/json", "Connection": "close"}
        is_admins = path.startswith("/evicpress/") and path not in _TOTALS
        if key := self._admin_api_key if is_admins else self._api_key:
            headers["Authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            try:
                data = orjson.dumps(body)
            except orjson.JSONEncodeError as error:  # such as half a surrogate pair
                raise EngineError(f"{where}: the request cannot be written as JSON: {error}") from None
        try:
            response = self._client.request(method, f"{self.url}{path}", content=data, headers=headers)
        except httpx.TimeoutException:
            raise Unreachable(f"{where}: no answer within {self._timeout_s:g} s") from None
        except httpx.ConnectError as error:
            raise Unreachable(f"{where}: cannot be reached: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise Unreachable(f"{where}: the connection broke: {str(error) or type(error).__name__}") from None
        if not response.is_success:
            raise refusal(response.status_code, _reason(response), where)
        text = response.content
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            raise EngineError(f"{where} answered {text!r:.100}: expected JSON") from None


def _reason(response: httpx.Response) -> str:
    """Why, in the server's words: ours, SGLang's, OpenAI's or FastAPI's way to say it, else the status in words."""
    try:
        said: Any = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.reason_phrase or "no reason given"
    for name in ("error", "reason", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return " ".join(said.split())[:500] if isinstance(said, str) else f"{said!r:.300}"
