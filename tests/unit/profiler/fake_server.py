"""A server over real HTTP that answers as SGLang with shadows does: its tokens are characters, its model a rule."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.quality.profile import Profile, context_keys

IDENTITY = bytes(range(16))
HEAD, TAIL = 1, 2  # around the user's message of a chat
LOSS = {"keydiff": 0.4, "snapkv": 1.0, "knorm": 1.5}  # natural logarithms per token, at nothing kept


class Refused(Exception):
    def __init__(self, status: int, body: object) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def no(status: int, reason: str) -> Refused:
    return Refused(status, {"error": {"reason": reason}})


class FakeServer:
    """``log`` has (method, path, body) of every request, ``shadows`` what is open. ``num_present`` tokens of a new
    shadow are copied, the rest is to be filled. ``before`` is called with each request and may raise Refused.
    """

    def __init__(self) -> None:
        self.url = ""
        self.log: list[tuple[str, str, Any]] = []
        self.keys: list[str | None] = []  # the Authorization headers
        self.before: Callable[[str, str, Any], None] = lambda method, path, body: None
        self.num_present = 10**9
        self.least_new_tokens = 0
        self.shadows: dict[int, dict[str, Any]] = {}
        self.cached: dict[str, list[int]] = {}  # by extra_key, one path each
        self.forms: dict[str, Form] = {}
        self.profiles: dict[str, dict[str, Any]] = {}
        self.menu = ["keydiff@0.5", "snapkv@0.5"]  # its --kv-forms
        self.layer_groups = list[int]()
        self.sinks = 4
        self.page_size, self.has_geometry = 1, False

    def refuse(self, error: Exception, ending: str = "", of: Callable[[Any], bool] = lambda body: True) -> None:
        """From now on requests to paths that end so, of whose bodies ``of`` is true, fail like this."""

        def raise_it(method: str, path: str, body: Any) -> None:
            if path.endswith(ending) and of(body):
                raise error

        self.before = raise_it

    def posted(self, ending: str) -> list[Any]:
        return [body for method, path, body in self.log if method == "POST" and path.endswith(ending)]

    def answer(self, method: str, path: str, body: Any) -> Any:
        self.log.append((method, path, body))
        self.before(method, path, body)
        match [method, *path.strip("/").split("/")]:
            case ["POST", "tokenize"]:
                return self._tokenize(body)
            case ["POST", "generate"]:
                return [self._generate(body, index) for index in range(len(body["input_ids"]))]
            case ["POST", "evicpress", "shadows"]:
                return self._open(body)
            case ["POST", "evicpress", "shadows", number, what]:
                if int(number) not in self.shadows:
                    raise no(404, f"shadow {number} is not open")
                return self._change(int(number), what, body)
            case ["GET", "evicpress", "stats"]:
                return {"layer_groups": self.layer_groups, "sinks": self.sinks}
            case ["GET", "evicpress", "profiles"]:
                profiles = [
                    {name: value for name, value in profile.items() if name != "forms"}
                    | {"num_forms": len(profile["forms"])}
                    for profile in self.profiles.values()
                ]
                facts = {"page_size": self.page_size, "has_geometry": self.has_geometry, "forms": self.menu}
                return {"identity": IDENTITY.hex(), "profiles": profiles, "default": {}, **facts}
            case ["GET", "evicpress", "profiles", key] if key not in self.profiles:
                raise no(404, f"context {key} has no profile")
            case ["GET", "evicpress", "profiles", key]:
                curve = {form: {"expected": mean - 0.01} for form, (_, mean, _) in self.profiles[key]["forms"].items()}
                return {**self.profiles[key], "curve": curve, "nodes": [1, 2]}
            case ["POST", "evicpress", "profiles"]:
                profile = Profile.from_json(body["profile"])
                earlier = self.profiles.get(profile.key.hex())
                profile = profile.completed(None if earlier is None else Profile.from_json(earlier))
                self.profiles[profile.key.hex()] = profile.to_json()
                return {"key": body["profile"]["key"]}
        raise Refused(404, {"detail": "Not Found"})

    def _tokenize(self, body: Any) -> Any:
        if "messages" in body:
            (message,) = body["messages"]
            tokens = [HEAD, *map(ord, message["content"]), TAIL]
        else:
            tokens = [ord(letter) for letter in body["prompt"]]
        return {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}

    def _open(self, body: Any) -> Any:
        number, tokens = len(self.log), body["token_ids"]
        extra_key = f"shadow-{number}"
        self.shadows[number] = {"tokens": tokens, "extra_key": extra_key}
        num_present = min(len(tokens), self.num_present)
        self.cached[extra_key] = tokens[:num_present]
        key = context_keys(IDENTITY, body["extra_key"], tokens)[-1].hex()
        return {
            "shadow": number,
            "key": key,
            "extra_key": extra_key,
            "num_tokens": len(tokens),
            "num_present": num_present,
        }

    def _change(self, number: int, what: str, body: Any) -> Any:
        shadow = self.shadows[number]
        if what == "close":
            del self.shadows[number]
            return {}
        form = Form.parse_stored(body["form"])
        if what == "forms" and form.press == "snapkv" and "snapkv@0.5" not in self.menu:
            raise no(409, f"shadow {number} cannot be brought to {form}: its press needs queries of the prompt")
        extra_key = f"{shadow['extra_key']}/{form}"
        if what == "drop":
            self.cached.pop(extra_key, None)
            return {}
        if len(self.cached.get(shadow["extra_key"], [])) < len(shadow["tokens"]):
            raise no(409, "the shadow is gone: its tokens are not all there")
        self.cached[extra_key] = shadow["tokens"]
        self.forms[extra_key] = form
        return {"extra_key": extra_key, "num_slots": round(len(shadow["tokens"]) * form.kept_fraction)}

    def _generate(self, body: Any, index: int) -> Any:
        tokens, extra_key = body["input_ids"][index], body["extra_key"]
        num_new = body["sampling_params"]["max_new_tokens"]
        if num_new < self.least_new_tokens:
            raise Refused(400, {"error": {"message": f"max_new_tokens must be at least {self.least_new_tokens}"}})
        known = self.cached.get(extra_key, [])
        num_cached = next((i for i, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1]), None)
        num_cached = min(len(known), len(tokens) - 1) if num_cached is None else num_cached
        if num_cached == len(known) and extra_key in {shadow["extra_key"] for shadow in self.shadows.values()}:
            self.cached[extra_key] = tokens[: len(tokens)] if len(tokens) % 64 == 0 else known
        form = self.forms.get(extra_key, EXACT)
        meta: dict[str, Any] = {"cached_tokens": num_cached, "finish_reason": {"type": "length", "length": num_new}}
        answer = [ord("a") + (tokens[-1] + step) % 26 for step in range(num_new)]
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[logprob_of(form), token, None] for token in answer]
            start = body.get("logprob_start_len")
            start = start[index] if isinstance(start, list) else start
            if start is not None:
                shown = tokens[start:]
                meta["input_token_logprobs"] = [
                    [None if i == 0 else logprob_of(form), token, None] for i, token in enumerate(shown)
                ]
                if body.get("top_logprobs_num"):
                    meta["input_top_logprobs"] = [None] + [
                        [[logprob_of(form), token, None], [math.log(0.01), 7, None]] for token in shown[1:]
                    ]
        return {"text": "".join(map(chr, answer)), "meta_info": meta}


def logprob_of(form: Form) -> float:
    return -0.1 - LOSS.get(form.press or "", 2.0) * (1.0 - form.kept_fraction) ** 2


@contextmanager
def serving() -> Iterator[FakeServer]:
    server = FakeServer()

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
            server.keys.append(self.headers.get("Authorization"))
            try:
                status, answer = 200, server.answer(self.command, self.path, body)
            except Refused as refused:
                status, answer = refused.status, refused.body
            except ConnectionAbortedError:
                return  # hang up without a word
            data = answer if isinstance(answer, bytes) else orjson.dumps(answer)
            self.send_response(status)
            if status == 307:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{web.server_address[1]}"
    try:
        yield server
    finally:
        web.shutdown()
        thread.join()
        web.server_close()
