"""Answers in JSON, as every ``/evicpress`` route gives them."""

from __future__ import annotations

from fastapi import Response

from sglang_evicpress.introspect.openapi import VERSION_HEADER
from sglang_evicpress.introspect.operation import VERSION

RETRY_AFTER_S = 1  # of a 503
COME_BACK = f"ask again in {RETRY_AFTER_S} s"
VERSION_HEADERS = {VERSION_HEADER: VERSION}


def json_response(status: int, body: bytes) -> Response:
    """``body`` is JSON already; a 503 says when to come back."""
    come_back = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    headers = VERSION_HEADERS | come_back
    return Response(body, status_code=status, media_type="application/json", headers=headers)
