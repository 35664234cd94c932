"""The arguments of the operations: one row each, with its reader, its JSON Schema and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sglang_evicpress.core import CODECS, Tier
from sglang_evicpress.introspect import arguments as checked
from sglang_evicpress.introspect.arguments import FIRST_ITEMS, MOST_ITEMS, MOST_SECONDS, Json
from sglang_evicpress.introspect.operation import Argument

HOLD_S = 60.0
"""How long a node stays as it was put by hand where the request does not say."""

CURSOR = "cursor"
"""Another name for where a listing goes on, whatever it is called there: ``next`` of the page before."""

_TIERS = (Tier.GPU, Tier.HOST, Tier.SSD)
_index, _amount = partial(checked.integer, least=0), partial(checked.integer, least=1)


def _integer(least: int) -> Json:
    return {"type": "integer", "minimum": least}


def _write_limit(arguments: Mapping[str, object], name: str) -> float | None:
    return None if arguments.get(name) is None else checked.gigabytes(arguments, name)


def _flag(name: str, text: str) -> Argument:
    return Argument(name, checked.flag, {"type": "boolean", "default": False}, text)


def limit(of: str, default: int, most: int = MOST_ITEMS) -> Argument:
    """Size of a page; ``default`` is that of an answer over HTTP."""
    text = f"{of} at most, and {most:,} whatever it is: next leads to the others"
    return Argument("limit", partial(_amount, default=default), {**_integer(1), "default": default}, text)


def _tier(accepted: tuple[Tier, ...], text: str) -> Argument:
    schema: Json = {"enum": [tier.label for tier in accepted]}
    return Argument("tier", partial(checked.tier, accepted=accepted), schema, text, is_required=True)


NODE_ID = Argument("node_id", _index, _integer(0), "id of a node, as the tree lists it", is_required=True)
AFTER_NODE = Argument("after", _index, _integer(0), "only nodes with ids above it", other_name=CURSOR)
LIMIT_NODES = limit("nodes", FIRST_ITEMS["tree"])
POSITIONS = _flag("positions", "with the positions that survived")
TOKENS = _flag("tokens", "with the token ids, which are a user's prompt: only with the admin key")
LAYER = Argument("layer", _index, _integer(0), "positions of this layer only")
SINCE = Argument(
    "since", partial(_index, default=0), _integer(0), "only decisions with numbers above it", False, CURSOR
)
LIMIT_DECISIONS = limit("decisions", FIRST_ITEMS["journal"])
NEWS = (
    Argument("since", _index, _integer(0), "only decisions with numbers above it"),
    LIMIT_DECISIONS,
    _flag("figures", "with stats and tiers"),
    Argument("requests", _index, _integer(0), "with requests whose numbers are above it"),
)
FORM = Argument("form", checked.form, {"type": "string"}, "form such as keydiff@0.5", is_required=True)
HOLD = Argument(
    "hold_seconds",
    partial(checked.seconds, default=HOLD_S),
    {"type": "number", "minimum": 0, "maximum": MOST_SECONDS, "default": HOLD_S},
    "seconds that the node stays so unless it is used",
)
NUM_SLOTS = Argument("num_slots", _amount, _integer(1), "slots to free at least", is_required=True)
ANY_TIER = _tier(_TIERS, "tier whose content is forgotten")
LOWER_TIER = _tier(_TIERS[1:], "tier to move it to")
CODEC = Argument("codec", checked.codec, {"enum": list(CODECS)}, "codec to store it with")
FOLDER = Argument("dir", checked.folder, {"type": "string"}, "absolute path of an allowed folder", is_required=True)
GIGABYTES = Argument(
    "gb", checked.gigabytes, {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}, "size in GB (1e9 bytes)", True
)
WRITE_LIMIT = Argument(
    "write_gb_per_day", _write_limit, {"type": ["number", "null"], "exclusiveMinimum": 0}, "GB that a day may write"
)
RID = Argument("rid", checked.name, {"type": "string"}, "only the request with this id")
OFFSET = Argument("offset", _index, _integer(0), "positions from this one on, as one page")
AFTER_REQUEST = Argument("after", _index, _integer(0), "only requests with numbers above it", other_name=CURSOR)
LIMIT_REQUESTS = limit("requests", 100, 100)
