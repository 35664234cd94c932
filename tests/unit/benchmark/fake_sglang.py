"""A server that answers as SGLang does, in an instant, and fails as its arguments say. Standard library only.

``fake_sglang.py PORT FILE [stock] [fail=SHARE] [refuse=SHARE] [violate] [die=N] [delay=SECONDS]``: a line for every
start and request goes into FILE; SHARE of the requests fail, or are refused; the process ends at its N-th request.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, FILE, *WORDS = sys.argv[1:]
OPTIONS = dict(word.partition("=")[::2] for word in WORDS)
NODES = [
    {"tier": "gpu", "form": "exact", "num_tokens": 10, "num_slots": 10},
    {"tier": "gpu", "form": "exact", "num_tokens": 5, "num_slots": 5},
    {"tier": "ssd", "form": "knorm@0.5", "num_tokens": 8, "num_slots": 4},
]
PAGE_NODES = 2
numbers = itertools.count(1)
asked = 0


def note(text: str) -> None:
    with open(FILE, "a") as file:  # noqa: PTH123
        file.write(f"{text}\n")


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        after = int(query.partition("after=")[2] or 0)
        end = after + PAGE_NODES
        ours: dict[str, Any] = {
            "/evicpress/stats": {
                "cached_slots": 15,
                "asked": asked,
                "admission": {"prompt_tokens": 9 * asked, "computed_tokens": {"late": asked}},
            },
            "/evicpress/tiers": {"tiers": {"gpu": {"used_bytes": 150}}},
            "/evicpress/tree": {"nodes": NODES[after:end], "next": end if end < len(NODES) else None},
        }
        if path == "/evicpress/tree":
            note(f"tree {after}")
        if path == "/health":
            self.say(200, {})
        elif "stock" not in OPTIONS and path in ours:
            self.say(200, ours[path])
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        global asked
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/evicpress/check":
            found = ["node 7 holds 2 slots"] if "violate" in OPTIONS else []
            self.say(200, {"ok": not found, "violations": found})
            return
        question = body["messages"][0]["content"]
        note(f"ask {' '.join(question.split())}")
        number = asked = next(numbers)
        if number == int(OPTIONS.get("die", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(OPTIONS.get("delay", 0)))
        refused = float(OPTIONS.get("refuse", 0))
        if refused and number % round(1 / refused) == 0:
            self.say(503, {"object": "error", "message": "too many wait"})
            return
        share = float(OPTIONS.get("fail", 0))
        if share and number % round(1 / share) == 0:
            self.say(500, {"object": "error", "message": "made to fail"})
            return
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        for piece in (
            {"choices": [{"delta": {"content": "to "}}]},
            {"choices": [{"delta": {"content": question}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ):
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, status: int, value: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    note(f"start {' '.join(WORDS)}")
    ThreadingHTTPServer(("127.0.0.1", int(PORT)), Answer).serve_forever()
