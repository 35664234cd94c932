"""Answers in JSON, as every ``/evicpress`` route gives them."""

from __future__ import annotations

from fastapi import Response

RETRY_AFTER_S = 1  # of a 503
COME_BACK = f"ask again in {RETRY_AFTER_S} s"


def json_response(status: int, body: bytes) -> Response:
    """``body`` is JSON already; a 503 says when to come back."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(body, status_code=status, media_type="application/json", headers=headers)
