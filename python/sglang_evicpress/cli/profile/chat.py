"""Asks an OpenAI-compatible endpoint, through the client of OpenAI, which asks again when a server is busy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from sglang_evicpress.profiler.transport import check_key, is_server_url

MAX_TRIES = 5


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

    def __post_init__(self) -> None:
        if not is_server_url(self.url) or not self.url.isascii() or not self.url.isprintable():
            raise ValueError(
                f"endpoint {self.url.rpartition('@')[2]!r:.200} cannot be asked: expected http:// or https:// and a "
                f"host, without a user name"
            )
        check_key(self.api_key)

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
        import openai

        parts = urlsplit(self._address)
        with openai.OpenAI(
            base_url=urlunsplit(parts._replace(path=parts.path.removesuffix("/chat/completions"), query="")),
            api_key=self.api_key or "none",
            default_query=dict(parse_qsl(parts.query)),
            max_retries=MAX_TRIES - 1,
            http_client=openai.DefaultHttpxClient(follow_redirects=False, timeout=self.timeout_s),
        ) as client:
            try:
                answer = client.chat.completions.with_raw_response.create(
                    model=self.model,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=temperature,
                    extra_headers=None if self.api_key else {"Authorization": openai.Omit()},
                )
            except openai.APIStatusError as error:
                why = f"status {error.status_code}, {self._said(error.response.text) or error.response.reason_phrase}"
                if error.status_code in (408, 409, 429) or error.status_code >= 500:
                    raise EndpointError(f"{self.name} did not answer in {MAX_TRIES} tries, at last: {why}") from None
                raise EndpointError(f"{self.name} refused: {why}") from None
            except openai.APIConnectionError as error:
                why = str(error.__cause__ or error)
                raise EndpointError(f"{self.name} did not answer in {MAX_TRIES} tries, at last: {why}") from None
            return self._content(answer.content)

    def _content(self, raw: bytes) -> str:
        try:
            content = json.loads(raw)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise EndpointError(f"{self.name} replied {raw[:200]!r}: expected a chat completion with a text")
        return content

    def _said(self, text: str) -> str:
        said = " ".join(text.split())[:300]
        return said.replace(self.api_key, "***") if self.api_key else said
