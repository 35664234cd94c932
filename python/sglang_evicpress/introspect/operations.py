"""Operations of a running cache, their arguments, and errors as statuses with a reason.

No transport here: ``patches/`` carries a question from HTTP to the scheduler and its answer back. A status
is an HTTP status: 200 answered (``check`` too, with ``"ok": false`` when an invariant is broken), 400 bad
arguments, 404 unknown operation or node, 409 the cache or the node does not allow it now, 500 unexpected, 501
this cache cannot be inspected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import orjson

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.error_text import code_path, short_repr
from sglang_evicpress.introspect import arguments as checked
from sglang_evicpress.introspect import parameters as given
from sglang_evicpress.introspect import schemas
from sglang_evicpress.introspect.arguments import PAGE_NODES, PAGE_OUTLINE, IntrospectionError, Json
from sglang_evicpress.introspect.operation import Access, Arguments, Operation, Question, asks, by_name
from sglang_evicpress.introspect.profile_operations import PROFILE_OPERATIONS

logger = logging.getLogger(__name__)

_ENCODING = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class UnknownNode(IntrospectionError):
    """No resident node has this id; ids are never reused, so it was dropped or never existed."""

    def __init__(self, node_id: int) -> None:
        super().__init__(404, f"node {node_id} is not in the tree: GET /evicpress/tree lists the ids")


class NodeBusy(IntrospectionError):
    """The node is locked by a running request; asking again later may succeed."""

    def __init__(
        self, node_id: int, why: str = "it is locked by a running request", *, change: str = "compressed"
    ) -> None:
        super().__init__(409, f"node {node_id} cannot be {change} now: {why}")


class InspectableTree(Protocol):
    """The tree, its policy and its journal."""

    def describe_tree(self, after: int = 0, limit: int = PAGE_NODES) -> Json:
        """Up to ``limit`` nodes, and never more than PAGE_NODES, with ids above ``after``, without their tokens and
        positions. ``next``: ``after`` of the following page, None at the end."""

    def describe_outline(self, after: int = 0, limit: int = PAGE_OUTLINE) -> Json:
        """Up to ``limit`` nodes, and never more than PAGE_OUTLINE, with ids above ``after``, each as a list of the
        values that ``columns`` names. ``next``: ``after`` of the following page, None at the end."""

    def describe_node(
        self, node_id: int, *, positions: bool = False, tokens: bool = False, layer: int | None = None
    ) -> Json:
        """One node, with the survivors' positions (of one layer, or all) and the token ids if asked. Raises
        UnknownNode, or IntrospectionError 400 for too many positions at once."""

    def explain_node(self, node_id: int) -> Json:
        """Options of a node, the next one chosen, and the reason. Raises UnknownNode."""

    def read_journal(self, since: int, limit: int) -> Json:
        """Up to ``limit`` decisions, and never more than PAGE_DECISIONS, with numbers above ``since``, oldest first.
        ``next``: ``since`` of the following page, None at the end."""

    def compress_node(self, node_id: int, form: Form, hold_s: float) -> Json:
        """Bring a node to ``form`` in place and hold it there: no idle server gives it its exact KV back before a
        request matches it, or ``hold_s`` seconds are over.

        Raises UnknownNode, NodeBusy, or ValueError whose text names the node, the form and why it cannot be.
        """

    def evict_slots(self, num_slots: int) -> Json:
        """Free at least ``num_slots`` slots if unlocked nodes allow it; the result says how many it were."""


class InspectableTiers(Protocol):
    """The tiers below the GPU."""

    def describe_tiers(self) -> Json:
        """Size, use, queues, bandwidth seen and errors by reason of every tier; without tiers, that there are none."""

    def flush_tier(self, tier: Tier) -> Json:
        """Forget what ``tier`` (GPU, HOST or SSD) holds and nothing uses. Raises ValueError, one sentence."""

    def demote_node(self, node_id: int, tier: Tier, hold_s: float, *, codec: str | None = None) -> Json:
        """Begin to move a node to ``tier`` (HOST or SSD), stored by ``codec`` if one is given, and hold it there: no
        idle server brings it back before a request matches it, or ``hold_s`` seconds are over. Pressure still moves it
        further down, or drops it.

        Raises UnknownNode, NodeBusy, or ValueError, one sentence.
        """

    def attach_ssd(self, folder: str, gb: float, write_gb_per_day: float | None) -> Json:
        """Start to use ``gb`` (1e9 bytes) of a folder as the SSD tier. Raises ValueError, one sentence."""

    def detach_ssd(self) -> Json:
        """Publish what is in flight to the SSD tier, then let go of its folder. Raises ValueError, one sentence."""


class InspectableRequests(Protocol):
    """Requests with a decode-time budget."""

    def describe_requests(
        self, rid: str | None, *, positions: bool = False, offset: int = 0, after: int = 0, limit: int = 100
    ) -> Json:
        """Requests with a decode-time budget: up to ``limit`` with numbers above ``after``, or those named. With
        ``positions`` what the slots of the last one named hold, from value ``offset`` on. Raises IntrospectionError
        404."""


@runtime_checkable
class Inspectable(InspectableTree, InspectableTiers, InspectableRequests, Protocol):
    """Cache that can be inspected. Called between scheduler steps: it has milliseconds.

    Results are JSON objects (numbers, strings, lists, dicts; numpy scalars and arrays are fine, tensors are
    not).
    """

    def describe_stats(self) -> Json:
        """Counters and sizes of the whole cache."""

    def describe_news(self, since: int, limit: int, *, figures: bool = False, requests: int | None = None) -> Json:
        """Several answers in one call, for those who listen: ``decisions``, as ``read_journal`` gives them; with
        ``figures`` also ``stats``, without their lists, and ``tiers``; with ``requests`` those with a budget whose
        numbers are above it, without their passes."""

    def check_integrity(self) -> Json:
        """``{"ok": bool, "violations": [str, ...]}``; a broken invariant is a finding, not an exception."""


def _check_requests(arguments: Arguments) -> None:
    rid, positions = checked.name(arguments, "rid"), checked.flag(arguments, "positions")
    if positions and rid is None:
        raise IntrospectionError(400, "positions is true without rid: expected the rid of one request")
    if "offset" in arguments and not positions:
        raise IntrospectionError(400, "offset is given without positions: expected positions=true")
    names = (*given.AFTER_REQUEST.names, "limit")
    if rid is not None and any(name in arguments for name in names):
        raise IntrospectionError(400, "after and limit list requests: expected them without rid")


OPERATIONS: dict[str, Operation] = by_name(
    Operation(
        "tree",
        asks(InspectableTree.describe_tree, named=(given.AFTER_NODE, given.LIMIT_NODES)),
        *("GET", "/evicpress/tree"),
        text="Every node: form, tokens, slots, tier, lineage, use",
        answer=schemas.TREE,
    ),
    Operation(
        "outline",
        asks(InspectableTree.describe_outline, named=(given.AFTER_NODE, given.LIMIT_NODES)),
        *("GET", "/evicpress/outline"),
        text="Every node in short, a list each: for pages that draw the tree",
        answer=schemas.OUTLINE,
    ),
    Operation(  # with tokens=true as Access.PROMPT
        "node",
        asks(InspectableTree.describe_node, given.NODE_ID, named=(given.POSITIONS, given.TOKENS, given.LAYER)),
        *("GET", "/evicpress/nodes/{node_id}"),
        text="One node: its options, positions and decisions",
        answer=schemas.NODE,
    ),
    Operation(
        "stats",
        asks(Inspectable.describe_stats),
        *("GET", "/evicpress/stats", Access.OPEN),
        text="Sizes of the pool, forms resident, costs learned, decisions so far",
        answer=schemas.STATS,
    ),
    Operation(
        "explain",
        asks(InspectableTree.explain_node, given.NODE_ID),
        *("GET", "/evicpress/explain/{node_id}"),
        text="Options of a node with bytes, quality, seconds and utility; which is next, and why",
        answer=schemas.EXPLAIN,
    ),
    Operation(
        "journal",
        asks(InspectableTree.read_journal, given.SINCE, given.LIMIT_DECISIONS),
        *("GET", "/evicpress/journal"),
        text="Decisions with their inputs, of the last 4,096",
        answer=schemas.JOURNAL,
    ),
    Operation(
        "compress",
        asks(InspectableTree.compress_node, given.NODE_ID, given.FORM, given.HOLD),
        *("POST", "/evicpress/nodes/{node_id}/compress", Access.ACT),
        may_conflict=True,
        text="Compress a node in place",
        answer=schemas.COMPRESSED,
        more_statuses=(507,),
    ),
    Operation(
        "check",
        asks(Inspectable.check_integrity),
        *("POST", "/evicpress/check", Access.ACT),
        text="Every invariant of the cache, looked at in one go",
        answer=schemas.CHECKED,
    ),
    Operation(
        "evict",
        asks(InspectableTree.evict_slots, given.NUM_SLOTS),
        *("POST", "/evicpress/evict", Access.ACT),
        text="Free slots of the GPU",
        answer=schemas.EVICTED,
    ),
    Operation(
        "tiers",
        asks(InspectableTiers.describe_tiers),
        *("GET", "/evicpress/tiers", Access.OPEN),
        text="Per tier: use, also by form, fragmentation, load times, wear; queues, errors",
        answer=schemas.TIERS,
    ),
    Operation(
        "flush",
        asks(InspectableTiers.flush_tier, given.ANY_TIER),
        *("POST", "/evicpress/flush", Access.ACT),
        may_conflict=True,
        takes_query=True,
        text="Forget the content of a tier",
        answer=schemas.ON_TIER,
    ),
    Operation(
        "demote",
        asks(InspectableTiers.demote_node, given.NODE_ID, given.LOWER_TIER, given.HOLD, named=(given.CODEC,)),
        *("POST", "/evicpress/nodes/{node_id}/demote", Access.ACT),
        may_conflict=True,
        text="Begin to move a node to a lower tier",
        answer=schemas.DEMOTED,
    ),
    Operation(
        "attach_ssd",
        asks(InspectableTiers.attach_ssd, given.FOLDER, given.GIGABYTES, given.WRITE_LIMIT),
        *("POST", "/evicpress/tiers/ssd", Access.FOLDER),
        may_conflict=True,
        text="Use a folder as the SSD tier",
        answer=schemas.OBJECT,
    ),
    Operation(
        "detach_ssd",
        asks(InspectableTiers.detach_ssd),
        *("POST", "/evicpress/tiers/ssd/detach", Access.ACT),
        may_conflict=True,
        text="Publish what is in flight to the SSD tier, and let go of its folder",
        answer=schemas.OBJECT,
    ),
    Operation(
        "requests",
        asks(
            InspectableRequests.describe_requests,
            given.RID,
            named=(given.POSITIONS, given.OFFSET, given.AFTER_REQUEST, given.LIMIT_REQUESTS),
            check=_check_requests,
        ),
        *("GET", "/evicpress/requests"),
        text="Running and ended requests with a budget, and what they dropped",
        answer=schemas.REQUESTS,
        more_statuses=(404,),
    ),
    *PROFILE_OPERATIONS,
    Operation("news", asks(Inspectable.describe_news, *given.NEWS[:2], named=given.NEWS[2:])),
)
"""Every operation by name; those with a path are served over HTTP."""


def read_question(op: str, arguments: Mapping[str, object]) -> Question:
    """Check ``arguments`` (values from JSON or, as text, from a URL) without a cache; the result asks one.

    Raises IntrospectionError 400 or 404, naming the value and what is accepted.
    """
    operation = OPERATIONS.get(op)
    if operation is None:
        raise IntrospectionError(404, f"operation {short_repr(op)} is not known: expected {', '.join(OPERATIONS)}")
    question = operation.read(arguments)
    return _allowed(question) if operation.may_conflict else question


def answer(cache: object, op: str, arguments: Mapping[str, object]) -> tuple[int, Json]:
    """Ask ``cache``; every outcome becomes (status, body). Never raises: it runs in the scheduler loop."""
    try:
        question = read_question(op, arguments)
        if not isinstance(cache, Inspectable):
            raise IntrospectionError(501, f"the cache is a {type(cache).__name__}, which cannot be inspected")
        return 200, question(cache)
    except IntrospectionError as error:
        return error.status, error.body
    except Exception as error:  # noqa: BLE001 - logged without its words, which may be a prompt
        logger.error("introspection %s with %s failed: %s", op, _sizes(arguments), code_path(error))
        return 500, IntrospectionError(500, f"{op} failed with {type(error).__name__}: {error}").body


def answer_encoded(
    cache: object, op: str, payload: bytes, more: Mapping[str, object] | None = None
) -> tuple[int, bytes]:
    """``answer`` over JSON: ``payload`` is an object of arguments; gives (status, body). Never raises. ``more`` is
    added to the body of a question that was answered."""
    try:
        status, body = answer(cache, op, read_object(payload))
        return status, encode({**body, **(more or {})} if status == 200 else body)
    except IntrospectionError as error:
        return error.status, encode(error.body)
    except orjson.JSONEncodeError as error:
        logger.error("the answer to introspection %s is not JSON: %s", op, code_path(error))
        return 500, encode(IntrospectionError(500, f"the answer to {op} is not JSON: {error}").body)


def shows_prompt(op: str, arguments: Mapping[str, object]) -> bool:
    """True if the answer has token ids of users' prompts in it."""
    return op == "node" and checked.flag(arguments, "tokens")


def _sizes(arguments: Mapping[str, object]) -> str:
    """Names and sizes of arguments: the values may be a prompt."""
    sizes = (
        f"{name} ({len(value) if isinstance(value, str | list | dict) else type(value).__name__})"
        for name, value in arguments.items()
    )
    return ", ".join(sizes) or "no arguments"


def encode(body: Mapping[str, object]) -> bytes:
    """``body`` as UTF-8 JSON. Raises ``orjson.JSONEncodeError`` (a TypeError) for what JSON cannot hold."""
    return orjson.dumps(body, option=_ENCODING)


def read_object(payload: bytes) -> Json:
    """A JSON object; nothing at all counts as an empty one. Raises IntrospectionError 400."""
    try:
        value = orjson.loads(payload) if payload.strip() else {}
    except orjson.JSONDecodeError as error:
        raise IntrospectionError(400, f"the request body is not JSON ({error}): expected an object") from None
    if not isinstance(value, dict):
        raise IntrospectionError(400, f"the request body is {short_repr(value)}: expected a JSON object")
    return value


def _allowed(question: Question) -> Question:
    """``question`` with a ValueError of the cache as a 409: the arguments were fine, but it cannot be done now."""

    def ask(cache: Inspectable) -> Json:
        try:
            return question(cache)
        except ValueError as error:
            raise IntrospectionError(409, str(error)) from error

    return ask
