"""Server that a command looks at, by the flags that all such commands have."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sglang_evicpress.cli.parser import Parser
from sglang_evicpress.cli.profile.connection import ADMIN_KEY_VARIABLE, KEY_VARIABLE, connect
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.transport import Transport

DEFAULT_URL = "http://127.0.0.1:30000"

Json = dict[str, Any]

_EPILOG = """Exit status: 0 shown, 2 bad input or no server, 130 Ctrl-C.
"""


def connected_parser(name: str, description: str, epilog: str = _EPILOG) -> Parser:
    """Parser of ``evicpress NAME`` with the flags of the connection, and ``--json``."""
    parser = Parser.of(name, description, epilog)
    parser.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server; default: the variable {KEY_VARIABLE}")
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"if it has one; default: {ADMIN_KEY_VARIABLE}")
    parser.add_json()
    return parser


class Server:
    """Answers of a server. A refusal, and no server at all, is a ValueError of one sentence."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @classmethod
    def of(cls, args: argparse.Namespace) -> Server:
        """The server of a parsed command line. Raises ValueError for a URL or a key that cannot be."""
        return cls(connect(args.url, args.api_key, args.admin_api_key))

    def get(self, path: str) -> Json:
        """The answer to ``GET /evicpress/PATH``. Raises ValueError."""
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """The answer to ``POST /evicpress/PATH``. Raises ValueError."""
        return self._ask("POST", path, body)

    def generate(self, body: Mapping[str, object]) -> Json:
        """The answer to a prompt. Raises ValueError."""
        try:
            return self._transport.generate(body)[0]
        except EngineError as error:
            raise ValueError(str(error)) from None

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        try:
            return self._transport.ask(method, f"/evicpress/{path}", body)
        except EngineError as error:
            raise ValueError(str(error)) from None
