"""Published shapes of the answers, as JSON Schema. A version may get further fields, and keeps those that are here."""

from __future__ import annotations

from typing import TypeAlias

from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.arguments import Json

Schema: TypeAlias = Json

OBJECT: Schema = {"type": "object"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNTS: Schema = {"type": "object", "additionalProperties": COUNT}
TIER: Schema = {"enum": [tier.label for tier in Tier if tier.label]}


def record(**fields: Schema) -> Schema:
    """An object that always has these fields, and perhaps others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def perhaps(schema: Schema, **fields: Schema) -> Schema:
    """The record, with fields that it has at times."""
    known = schema["properties"]
    return {**schema, "properties": {**known, **fields} if isinstance(known, dict) else fields}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(values: Schema) -> Schema:
    """An object whose names are not known before."""
    return {"type": "object", "additionalProperties": values}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def told(schema: Schema, text: str) -> Schema:
    return {**schema, "description": text}


def page(name: str, items: Schema, cursor: Schema, **fields: Schema) -> Schema:
    """A page of a listing."""
    following = told(nullable(cursor), "cursor of the following page, null at the end")
    return record(**{name: array(items), "next": following}, **fields)


ERROR = record(error=record(reason=told(TEXT, "one sentence: the value and what is accepted")))

_SUMMARY = record(
    id=COUNT,
    parent_id=told(nullable(COUNT), "null for a child of the root"),
    children=told(array(COUNT), "the first of them"),
    num_children=COUNT,
    start=told(COUNT, "tokens above it"),
    num_tokens=COUNT,
    num_slots=told(COUNT, "slots of the GPU that it needs there"),
    form=TEXT,
    is_shadow=FLAG,
    num_profiles=COUNT,
    tier=TIER,
    copies=told(by_name(TEXT), "forms of its copies on lower tiers, and in the external store"),
    origin=told(nullable(COUNT), "number of the compression that it comes from"),
    lineage={"enum": ["exact", "lossy"]},
    computed_on={"enum": ["exact", "lossy"]},
    lock_ref=COUNT,
    weight=told(NUMBER, "uses per second expected"),
    num_hits=COUNT,
    last_use=NUMBER,
    has_queries=FLAG,
    namespace=told(nullable(TEXT), "keyed hash of its salt and adapter"),
)
_DECISION = record(
    number=told(COUNT, "from 1, without gaps"),
    time_s=NUMBER,
    node_id=COUNT,
    kind=TEXT,
    **{"from": TEXT},
    to=TEXT,
    bytes_before=COUNT,
    bytes=COUNT,
    freed_bytes=INTEGER,
    weight=NUMBER,
    quality_before=nullable(NUMBER),
    quality=nullable(NUMBER),
    delay_before_s=nullable(NUMBER),
    delay_s=nullable(NUMBER),
    loss=told(NUMBER, "weighted seconds; below 0 a gain"),
    reason=TEXT,
)
_COST = record(prefill_fixed_s=NUMBER, prefill_per_token_s=NUMBER, prefill_per_pair_s=NUMBER)

TREE = page("nodes", _SUMMARY, COUNT, page_size=COUNT, num_nodes=COUNT)
OUTLINE = page(
    "nodes", told({"type": "array"}, "one value for each column"), COUNT, columns=array(TEXT), num_nodes=COUNT
)
NODE: Schema = {
    "allOf": [
        _SUMMARY,
        record(
            tokens_hash=told(TEXT, "keyed hash"),
            options=array(record(form=TEXT, num_slots=COUNT)),
            layer_slots=told(nullable(array(COUNT)), "slots that each layer fills, null of an exact node"),
            hold_seconds_left=NUMBER,
            decisions=array(_DECISION),
        ),
    ]
}
EXPLAIN = record(
    node_id=COUNT,
    policy=TEXT,
    weight=NUMBER,
    num_tokens=COUNT,
    depth_tokens=COUNT,
    holds=TEXT,
    num_bytes=COUNT,
    next=told(nullable(TEXT), "what would be done with it next"),
    why=TEXT,
    options=array(record(option=TEXT, num_bytes=COUNT, q=NUMBER, d=NUMBER, U=NUMBER, freed_bytes=INTEGER, role=TEXT)),
    num_hits=COUNT,
    weight_horizon_s=nullable(NUMBER),
    costs=_COST,
    recompute_weight=NUMBER,
    read_weight=NUMBER,
    decisions=array(_DECISION),
)
JOURNAL = page(
    "entries",
    _DECISION,
    COUNT,
    now_s=NUMBER,
    num_decisions=COUNT,
    num_lost=told(COUNT, "decisions asked for that had to make room"),
    last=told(COUNT, "since of the next question, for who reads on later"),
)
STATS = record(
    policy=TEXT,
    alpha=told(nullable(NUMBER), "null for a policy that weighs no quality"),
    quality=record(target=nullable(NUMBER), predicted=nullable(NUMBER), measured=nullable(NUMBER)),
    reuse=OBJECT,
    forms=array(TEXT),
    layer_groups=array(COUNT),
    sinks=COUNT,
    host_gb={"type": ["number", "string", "null"]},
    now_s=NUMBER,
    costs=record(in_use=_COST, learned=_COST, num_observations=COUNT, recompute_weight=NUMBER, read_weight=NUMBER),
    running=record(requests=COUNT),
    waiting=record(requests=COUNT, queued_hit_nodes=COUNT),
    queue=record(expected_wait_s=nullable(NUMBER), margin_s=NUMBER, admitted_per_s=nullable(NUMBER), refused=COUNT),
    page_size=COUNT,
    total_slots=COUNT,
    free_slots=COUNT,
    evictable_slots=COUNT,
    protected_slots=COUNT,
    in_flight_slots=COUNT,
    shadow_slots=COUNT,
    num_nodes=COUNT,
    cached_tokens=COUNT,
    cached_slots=COUNT,
    resident_forms=OBJECT,
    decisions=record(
        compressed=COUNTS,
        dropped=COUNT,
        demoted=COUNTS,
        dropped_tokens=COUNT,
        freed_slots=COUNT,
        failed=COUNTS,
        by_reason=by_name(COUNTS),
    ),
    admission=record(requests=COUNT, prompt_tokens=COUNT),
    drops=OBJECT,
    served=record(tokens=by_name(COUNTS), saved_s=by_name(NUMBER)),
    first_tokens=record(num_seen=COUNT, num_recent=COUNT, mean_s=nullable(NUMBER), p95_s=nullable(NUMBER)),
    evictions=OBJECT,
    tenants=told(by_name(record(held_bytes=COUNTS, limit_bytes=COUNTS)), "of tenants with limits, by tier"),
    utility_lost_s=nullable(NUMBER),
    threads=array(record(name=TEXT, state=TEXT, num_failures=COUNT, last_failure=nullable(TEXT))),
    calls=told(by_name(record(count=COUNT, cpu_ms=NUMBER, max_cpu_ms=NUMBER, max_wall_ms=NUMBER)), "cost so far"),
)
TIERS = record(
    tiers=by_name(
        record(
            capacity_bytes=COUNT,
            used_bytes=COUNT,
            num_nodes=COUNT,
            forms=by_name(record(bytes=COUNT, tokens=COUNT)),
            compression=told(nullable(NUMBER), "bytes of raw, exact KV over bytes taken"),
        )
    ),
    queue=COUNTS,
    requests_waiting_for_a_copy=COUNT,
    counts=COUNTS,
    errors=COUNTS,
)
_FOLLOWING = told(nullable(COUNT), "cursor of the following page, null at the end; not of a single request")
REQUESTS = perhaps(
    record(
        requests=array(
            record(
                rid=TEXT,
                number=COUNT,
                state={"enum": ["waiting", "running", "ended"]},
                budget_tokens=COUNT,
                slots=COUNT,
            )
        ),
        totals=record(requests=COUNT, passes=COUNT, tokens_evicted=COUNT),
    ),
    next=_FOLLOWING,
)
PROFILES = page(
    "profiles",
    record(key=TEXT, num_tokens=COUNT, num_forms=COUNT, scorer=TEXT, query_set=TEXT),
    TEXT,
    identity=TEXT,
    page_size=COUNT,
    has_geometry=told(FLAG, "true where presses can be asked for that --kv-geometry is for"),
    file=nullable(TEXT),
    forms=array(TEXT),
    default=told(by_name(NUMBER), "quality that contexts without a profile are taken for"),
    online_profiling=FLAG,
    num_profiles=COUNT,
    counts=OBJECT,
)
PROFILE = record(
    key=TEXT,
    num_tokens=COUNT,
    forms=OBJECT,
    scorer=TEXT,
    query_set=TEXT,
    num_queries=COUNT,
    measured_s=NUMBER,
    curve=by_name(record(count=NUMBER, mean=NUMBER, std=NUMBER, expected=NUMBER)),
    nodes=array(COUNT),
)
COMPRESSED: Schema = {"allOf": [_SUMMARY, record(freed_slots=INTEGER, hold_seconds_left=NUMBER)]}
DEMOTED = record(id=COUNT, tier=TIER, form=TEXT, is_there=FLAG, hold_seconds_left=NUMBER)
EVICTED = record(freed_slots=COUNT, free_slots=COUNT)
CHECKED = record(ok=FLAG, violations=array(TEXT))
ON_TIER = record(tier=TIER)
