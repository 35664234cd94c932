"""Operations as OpenAPI publishes them, and as the table of docs/endpoints.md lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sglang_evicpress.introspect import arguments as checked
from sglang_evicpress.introspect.arguments import Json
from sglang_evicpress.introspect.operation import Access, Argument, Operation, stable_path
from sglang_evicpress.introspect.schemas import ERROR
from sglang_evicpress.tables import markdown

VERSION_HEADER = "EvicPress-Version"

EVENTS = "Server-sent events: decisions as they happen, stats, tiers, requests with a budget"
PAGE = "A page that shows the cache"

_CALLERS = {
    Access.OPEN: "Totals, for whoever may use the server.",
    Access.READ: "With --admin-api-key only for its holders.",
    Access.ACT: "For operators: holders of the admin key, or this machine's own users where there is none.",
    Access.FOLDER: "For holders of the admin key only.",
}
_REASONS = {
    400: "An argument is not known or has a value that is not accepted; the reason names both",
    401: "No key, or a wrong one",
    403: "The caller is no operator",
    404: "There is none of that name",
    408: "The body did not arrive in time",
    409: "It cannot be done now",
    413: "The body is too long",
    500: "Unexpected: see the log",
    503: "Too many wait already: Retry-After says when to come back",
    504: "The scheduler did not answer in time",
    507: "There is no memory or no disk space for it",
}
_PATH_ARGUMENT = re.compile(r"{(\w+)}")


def described(operation: Operation) -> Json:
    """The Operation Object of an operation."""
    in_path, others = _arguments(operation)
    parameters: list[Json] = [_parameter(argument, argument.name, "path") for argument in in_path]
    if operation.method == "GET" or operation.takes_query:
        parameters += [_parameter(argument, name, "query") for argument in others for name in argument.names]
    found: Json = {
        "summary": operation.text or operation.name,
        "description": _CALLERS.get(operation.access, ""),
        "tags": ["evicpress"],
        "parameters": parameters,
        "responses": responses(operation.text, "application/json", operation.answer, _statuses(operation)),
    }
    if operation.method == "POST" and others:
        properties = {each.name: {**each.schema, "description": each.text} for each in others}
        required = [each.name for each in others if each.is_required and not operation.takes_query]
        schema: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        body: Json = {"schema": schema | ({"required": required} if required else {})}
        found["requestBody"] = {"content": {"application/json": body}, "required": bool(required)}
    return found


def responses(text: str, media_type: str, answer: Json, statuses: Iterable[int]) -> Json:
    """The Responses Object: the answer, and errors by their statuses."""
    version = {"description": "Version of paths, arguments and answers", "schema": {"type": "string"}}
    content = {media_type: {"schema": answer}}
    found: Json = {"200": {"description": text, "content": content, "headers": {VERSION_HEADER: version}}}
    for status in sorted(statuses):
        error: Json = {"description": _REASONS[status]}
        if status != 401:  # that is SGLang's
            error["content"] = {"application/json": {"schema": ERROR}}
        found[str(status)] = error
    return found


def table(operations: Iterable[Operation]) -> Iterator[str]:
    """Lines of a Markdown table of operations."""
    rows = []
    for operation in operations:
        _, others = _arguments(operation)
        names = ", ".join(f"`{'` or `'.join(each.names)}`{'' if each.is_required else '?'}" for each in others)
        rows.append([f"{operation.method} `{stable_path(operation.path)}`", operation.text, names])
    return markdown(["call", "what", "arguments (? may be left out)"], rows, num_text=3)


def _arguments(operation: Operation) -> tuple[list[Argument], list[Argument]]:
    """Arguments in the path, and the others."""
    names = _PATH_ARGUMENT.findall(operation.path)
    known = {argument.name: argument for argument in operation.arguments}
    in_path = [known[name] if name in known else Argument(name, checked.name, {"type": "string"}, "") for name in names]
    return in_path, [argument for name, argument in known.items() if name not in names]


def _parameter(argument: Argument, name: str, place: str) -> Json:
    """In a query nothing is required: a POST may have it in its body."""
    text = argument.text if name == argument.name else f"the same as {argument.name}: next of the page before"
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": argument.schema}


def _statuses(operation: Operation) -> set[int]:
    has_path_argument = bool(_PATH_ARGUMENT.search(operation.path))
    return {
        *(400, 401, 500, 503, 504),
        *((403, 408, 413) if operation.method == "POST" else ()),
        *((403,) if any(each.name == "tokens" for each in operation.arguments) else ()),
        *((404,) if has_path_argument else ()),
        *((409,) if operation.may_conflict and operation.method == "POST" else ()),
        *operation.more_statuses,
    }
