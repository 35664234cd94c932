"""Asks an OpenAI-compatible endpoint, through the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

MAX_TRIES = 5
MAX_WAIT_S = 60.0
MAX_REPLY_BYTES = 1 << 20


class EndpointError(Exception):
    """The endpoint gave nothing that can be used; one sentence names it and says why."""


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """``url`` is the server's, with or without ``/v1`` or ``/v1/chat/completions``. ``api_key`` is sent to it alone:
    redirects are not followed. Raises ValueError for a URL or a key that cannot be used."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or "@" in parts.netloc or not self.url.isascii() or not self.url.isprintable():
            raise ValueError(
                f"endpoint {self.url.rpartition('@')[2]!r:.200} cannot be asked: expected http:// or https:// and a "
                f"host, without a user name"
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key has characters that no header may have: expected printable ASCII")

    @property
    def name(self) -> str:
        """Name in messages: the address that is asked, without a query, where keys may be."""
        return urlunsplit(urlsplit(self._address)._replace(query="", fragment=""))

    @property
    def _address(self) -> str:
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions"):
            path += "/chat/completions" if path.endswith("/v1") else "/v1/chat/completions"
        return urlunsplit(parts._replace(path=path, fragment=""))

    def complete(self, prompt: str, *, temperature: float = 0.0) -> str:
        """The model's reply to one message. Waits and asks again when the server is busy or away, ``MAX_TRIES`` times
        in all. Raises EndpointError."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "stream": False,
        }
        request = urllib.request.Request(self._address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if self.api_key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        why, wait_s = "", 0.0
        for attempt in range(MAX_TRIES):
            if attempt:
                self.sleep(wait_s)
            wait_s = 2.0**attempt
            try:
                with _OPENER.open(request, timeout=self.timeout_s) as answer:
                    return self._content(answer.read(MAX_REPLY_BYTES + 1))
            except urllib.error.HTTPError as error:
                with error:
                    why = self._refusal(error)
                if error.code not in (408, 429) and error.code < 500:
                    raise EndpointError(f"{self.name} refused: {why}") from None
                wait_s = _retry_after_s(error.headers.get("Retry-After"), wait_s)
            except (OSError, http.client.HTTPException) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
        raise EndpointError(f"{self.name} did not answer in {MAX_TRIES} tries, at last: {why}")

    def _content(self, raw: bytes) -> str:
        if len(raw) > MAX_REPLY_BYTES:
            raise EndpointError(f"{self.name} replied with more than {MAX_REPLY_BYTES} bytes: expected a short reply")
        try:
            content = json.loads(raw)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise EndpointError(f"{self.name} replied {raw[:200]!r}: expected a chat completion with a text")
        return content

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        try:
            said = " ".join(error.read(4096).decode("utf-8", "replace").split())[:300]
        except (OSError, http.client.HTTPException):
            said = ""
        if self.api_key:
            said = said.replace(self.api_key, "***")
        return f"status {error.code}, {said or error.reason}"


def _retry_after_s(given: str | None, default_s: float) -> float:
    """Seconds as the server gave them, at most ``MAX_WAIT_S``; a date, or nothing: the default."""
    return min(float(given), MAX_WAIT_S) if given and given.isascii() and given.isdigit() else default_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A redirect is an error that names its status."""


_OPENER = urllib.request.build_opener(_NoRedirect)
