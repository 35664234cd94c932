"""Connection of a command to a server: URL and keys from flags and the environment."""

from __future__ import annotations

import os

from sglang_evicpress.cli.parser import naming
from sglang_evicpress.profiler.transport import HttpTransport

KEY_VARIABLE = "EVICPRESS_API_KEY"
ADMIN_KEY_VARIABLE = "EVICPRESS_ADMIN_API_KEY"
WAIT_S = 2.0  # before each retry


def connect(url: str, api_key: str | None, admin_api_key: str | None = None, *, num_retries: int = 0) -> HttpTransport:
    """To the server at ``url``, by the keys of the environment where none are given. Raises ValueError."""
    key, admin_key = api_key or os.environ.get(KEY_VARIABLE), admin_api_key or os.environ.get(ADMIN_KEY_VARIABLE)
    with naming("--url"):
        return HttpTransport(url, api_key=key, admin_api_key=admin_key, num_retries=num_retries, wait_s=WAIT_S)
