"""Access rules of the ``/evicpress`` routes, beyond the levels that SGLang's own key check knows."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from sglang.srt.utils.auth import AuthLevel

from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.operation import Access

if TYPE_CHECKING:
    from fastapi import Request

_FROM_ELSEWHERE = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin", "sec-fetch-site")
"""Headers that proxies add, and browsers for what a page does: such a caller is not a user of this machine."""


def level_of(access: Access) -> AuthLevel:
    """SGLang's own check comes first; with an admin key it asks for that on every level but NORMAL."""
    return AuthLevel.NORMAL if access is Access.OPEN else AuthLevel.ADMIN_OPTIONAL


@dataclass(frozen=True, slots=True)
class AccessRules:
    """``has_admin_key``: the server was started with --admin-api-key. ``host``: the address it listens on."""

    has_admin_key: bool = False
    host: str = "127.0.0.1"

    def check(self, access: Access, request: Request) -> None:
        """Raises IntrospectionError 403, naming the flag, for a caller who may not."""
        if self.has_admin_key or access in (Access.OPEN, Access.READ):
            return  # SGLang has asked for the key already
        if access is Access.PROMPT:
            raise IntrospectionError(403, "tokens=true shows users' prompts: start the server with --admin-api-key")
        if access is Access.FOLDER:
            reason = "a folder of the server's machine is only taken from an operator: start it with --admin-api-key"
            raise IntrospectionError(403, reason)
        peer = None if request.client is None else request.client.host  # None: a Unix socket
        is_local = self.host == "localhost" or _is_loopback(self.host, default=False)
        is_local &= peer is None or _is_loopback(peer, default=True)
        if not is_local or any(name in request.headers for name in _FROM_ELSEWHERE):
            reason = (
                f"{request.method} {request.url.path} is for operators: start the server with --admin-api-key, or "
                "call it from this machine while it listens on a loopback --host"
            )
            raise IntrospectionError(403, reason)


def _is_loopback(host: str, *, default: bool) -> bool:
    """``default``: of what is no IP address, such as the name of a Unix socket."""
    try:
        address = ip_address(host)
    except ValueError:
        return default
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (address if mapped is None else mapped).is_loopback
