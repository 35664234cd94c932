"""Every refusal of a flag, a file, a request's field or a call: one table, one test.

What SGLang's own command line adds to a flag's sentence is in the contract tests of server arguments, the statuses
that only HTTP knows in those of the routes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.introspect.fake_cache import FakeCache
from tests.unit.introspect.test_profile_questions import ARGUMENTS, KEY, MAX_TOKEN, PROFILE, PROFILE_NAMES

from sglang_evicpress.asked_quality import asks_exact, check_quality
from sglang_evicpress.asked_retention import check_retention, retention_s
from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.introspect.operations import OPERATIONS, answer

Row = tuple[str, int, object, tuple[str, ...]]
TABLE: tuple[Row, ...] = (
    # The door, the exit status or that of HTTP, what comes in, and what the sentence says: the value, what is accepted.
    # ---- flags: the value is checked where the server starts, which ends with status 2
    ("flags", 2, {"policy": "fifo"}, ("'fifo'", "evicpress, lru", "hpt", "PRESS@KEPT+lru")),
    ("flags", 2, {"policy": "belady"}, ("'belady'", "evicpress, lru")),
    ("flags", 2, {"policy": "lz4@0.5+lru"}, ("'lz4@0.5+lru'", "PRESS@KEPT+lru")),
    ("flags", 2, {"policy": "impress@2"}, ("'impress@2'", "impress@X")),
    ("flags", 2, {"max_queue_seconds": 0}, ("max_queue_seconds", "0", "above 0")),
    ("flags", 2, {"max_queue_seconds": float("nan")}, ("max_queue_seconds", "nan", "finite")),
    ("flags", 2, {"max_queue_seconds": 0}, ("max_queue_seconds", "0", "above 0")),
    ("flags", 2, {"alpha": float("nan")}, ("alpha", "nan", "finite")),
    ("flags", 2, {"alpha": -0.1}, ("alpha", "-0.1", "at least 0")),
    ("flags", 2, {"alpha": "much"}, ("alpha", "'much'", "number")),
    ("flags", 2, {"forms": ""}, ("''", "PRESS@KEPT")),
    ("flags", 2, {"forms": "lz4@0.5"}, ("'lz4@0.5'", "PRESS@KEPT")),
    ("flags", 2, {"min_compress_tokens": 0}, ("min_compress_tokens", "0", "at least 1")),
    ("flags", 2, {"sinks": -1}, ("sinks", "-1", "at least 0")),
    ("flags", 2, {"sinks": 1.5}, ("sinks", "1.5", "whole number")),
    ("flags", 2, {"host_gb": -1}, ("host_gb", "-1", "0 for no host tier", "0.016")),
    ("flags", 2, {"host_gb": float("nan")}, ("host_gb", "nan", "0.016")),
    ("flags", 2, {"host_gb": "x"}, ("host_gb is 'x'", "auto, 0 for no host tier, or a number of GB")),
    ("flags", 2, {"host_gb": "nan"}, ("host_gb", "nan", "0.016")),
    ("flags", 2, {"host_gb": 0.0159}, ("host_gb", "0.0159", "from 0.016")),
    ("flags", 2, {"ssd_dir": "/kv"}, ("'/kv'", "without ssd_gb", "GB")),
    ("flags", 2, {"ssd_dir": "", "ssd_gb": 1}, ("''", "no path", "folder")),
    ("flags", 2, {"ssd_dir": "/kv\0", "ssd_gb": 1}, ("no path", "folder")),
    ("flags", 2, {"ssd_dir": "/kv", "ssd_gb": 0}, ("ssd_gb", "0.0", "from 0.016")),
    ("flags", 2, {"ssd_dir": "/kv", "ssd_gb": float("nan")}, ("ssd_gb", "nan", "from 0.016")),
    ("flags", 2, {"ssd_dir": "/kv", "ssd_gb": 1, "host_gb": 0}, ("host_gb is 0", "'/kv'", "0.016")),
    ("flags", 2, {"ssd_gb": 5}, ("ssd_gb", "5.0", "without ssd_dir", "leave out ssd_gb")),
    ("flags", 2, {"ssd_write_gb_per_day": 5}, ("ssd_write_gb_per_day", "5.0", "without ssd_dir")),
    ("flags", 2, {"ssd_dir": "/kv", "ssd_gb": 1, "ssd_write_gb_per_day": 0}, ("ssd_write_gb_per_day", "0", "above 0")),
    ("flags", 2, {"ssd_dir": "/kv", "ssd_gb": 1, "ssd_write_gb_per_day": float("nan")}, ("nan", "above 0")),
    ("flags", 2, {"ssd_allow_dir": "/kv,kv"}, ("ssd_allow_dir 'kv'", "absolute")),
    ("flags", 2, {"ssd_allow_dir": ""}, ("ssd_allow_dir ''", "absolute")),
    ("flags", 2, {"ssd_key_file": "", "ssd_allow_dir": "/kv"}, ("ssd_key_file is ''", "path of a file")),
    ("flags", 2, {"external_backend": "hf3fs"}, ("'hf3fs'", "one of file, mooncake, nixl, dynamic")),
    ("flags", 2, {"external_config": "{}"}, ("without external_backend", "expected both")),
    ("flags", 2, {"external_backend": "file", "external_config": "{"}, ("'{' is not JSON", "a JSON object, or @")),
    ("flags", 2, {"external_backend": "file", "external_config": "[]"}, ("external_config is", "a JSON object")),
    ("flags", 2, {"external_backend": "file", "external_config": "@/none"}, ("'@/none'", "does not exist")),
    ("flags", 2, {"external_backend": "file"}, ("file_storage_path in external_config is None", "an absolute path")),
    (
        "flags",
        2,
        {"external_backend": "mooncake", "host_gb": 0},
        ("external_backend 'mooncake'", "expected at least 0.016"),
    ),
    ("flags", 2, {"ssd_key_file": "/key"}, ("'/key'", "without ssd_dir and ssd_allow_dir")),
    ("flags", 2, {"ssd_fsync": "often"}, ("ssd_fsync", "'often'", "none, batch, always")),
    ("flags", 2, {"geometry": ""}, ("geometry is ''", "path of a file")),
    (
        "flags",
        2,
        {"forms": "keydiff@0.5,geometry@0.5"},
        ("form geometry@0.5", "--kv-geometry FILE", "leave out the form"),
    ),
    ("flags", 2, {"forms": "geometry@0.5+int4"}, ("form geometry@0.5+int4", "--kv-geometry FILE")),
    ("flags", 2, {"policy": "geometry@0.2+lru"}, ("form geometry@0.2", "--kv-geometry FILE")),
    ("flags", 2, {"quality": 0.9, "alpha": 2}, ("quality is 0.9 and alpha 2: expected one of them",)),
    ("flags", 2, {"policy": "lru", **{"quality": 0.9}}, ("quality is 0.9 with policy 'lru': expected evicpress",)),
    (
        "flags",
        2,
        {"policy": "keydiff@0.5+lru", **{"quality": 1}},
        ("quality is 1 with policy 'keydiff@0.5+lru': expected evicpress",),
    ),
    ("flags", 2, {"quality": 0}, ("quality is 0: expected a number above 0, at most 1",)),
    ("flags", 2, {"quality": 1.1}, ("quality is 1.1: expected a number above 0, at most 1",)),
    ("flags", 2, {"quality": math.nan}, ("quality is nan: expected a number above 0, at most 1",)),
    ("flags", 2, {"drift_threshold": 0.0}, ("drift_threshold is ", "expected")),
    ("flags", 2, {"drift_threshold": 1.5}, ("drift_threshold is ", "expected")),
    ("flags", 2, {"drift_threshold": math.nan}, ("drift_threshold is ", "expected")),
    ("flags", 2, {"profile_path": " "}, ("profile_path is ", "expected")),
    # ---- files: their content, None where there is none
    ("policy_config", 2, "{", ("is not JSON", "JSON object")),
    ("policy_config", 2, "", ("is not JSON", "JSON object")),
    ("policy_config", 2, [1], ("list", "expected an object")),
    (
        "policy_config",
        2,
        {"alhpa": 1},
        ("'alhpa'", "alpha, forms, layer_budget, max_layer_counts, min_compress_tokens"),
    ),
    ("policy_config", 2, {"policy": 3}, ("policy", "3", "a string")),
    ("policy_config", 2, {"max_queue_seconds": "10"}, ("max_queue_seconds", "'10'", "expected finite seconds")),
    ("policy_config", 2, {"alpha": True}, ("alpha", "True", "number")),
    ("policy_config", 2, {"forms": [0.5]}, ("forms", "[0.5]", "list")),
    ("policy_config", 2, {"forms": []}, ("forms", "at least one form")),
    ("policy_config", 2, {"min_compress_tokens": 1.0}, ("min_compress_tokens", "1.0", "whole number")),
    ("policy_config", 2, {"sinks": False}, ("sinks", "False", "whole number")),
    ("policy_config", 2, {"window": 0}, ("window", "0", "at least 1")),
    ("policy_config", 2, {"min_match_kept": 1.5}, ("min_match_kept", "1.5", "from 0 to 1")),
    ("policy_config", 2, '{"max_queue_seconds": 1' + "0" * 400 + "}", ("max_queue_seconds", "1000", "finite seconds")),
    ("policy_config", 2, '{"alpha": 1' + "0" * 5000 + "}", ("is not JSON", "JSON object")),
    ("policy_config", 2, "[" * 100_000, ("is not JSON", "JSON object")),
    ("policy_config", 2, '{"min_match_kept": NaN}', ("min_match_kept", "nan", "from 0 to 1")),
    ("policy_config", 2, {"prefill_fixed_s": -1}, ("prefill_fixed_s", "-1", "at least 0")),
    ("policy_config", 2, {"prefill_per_token_s": None}, ("prefill_per_token_s", "None", "number")),
    ("policy_config", 2, {"curves": [1]}, ("curves", "[1]", "object")),
    ("policy_config", 2, {"ssd_dir": 8}, ("ssd_dir", "8", "a string")),
    ("policy_config", 2, {"ssd_fsync": None}, ("ssd_fsync", "None", "one of none")),
    ("policy_config", 2, {"curves": {"lz4": {"0.5": 1}}}, ("'lz4'", "keydiff")),
    ("quality_curves", 2, None, ("does not exist", "expected a JSON file")),
    ("quality_curves", 2, "{", ("not JSON", "expected quality curves")),
    ("quality_curves", 2, "null", ("are None", "expected an object")),
    ("quality_curves", 2, "[]", ("are []", "expected an object")),
    ("quality_curves", 2, '{"zip": {"0.5": 0.9}}', ("'zip'", "expected one of")),
    ("quality_curves", 2, '{"keydiff": {"0.5": 2}}', ("is 2", "expected a number in [0, 1]")),
    ("tenants", 2, None, ("does not exist", "a JSON file of tenants")),
    ("tenants", 2, "{", ("not JSON", "tenants")),
    ("tenants", 2, [1], ("tenants is [1]: expected an object of tenants, such as",)),
    ("tenants", 2, {"acme": 5}, ("tenant 'acme' is 5: expected cache_salt and one or more of kv_quality, gpu_gb",)),
    (
        "tenants",
        2,
        {"acme": {"salt": "a"}},
        ("tenant 'acme' has the unknown key 'salt': expected cache_salt and one or more of kv_quality",),
    ),
    (
        "tenants",
        2,
        {"acme": {"cache_salt": "", "kv_quality": 0.9}},
        ("tenant 'acme' has no cache_salt that is a text",),
    ),
    ("tenants", 2, {"acme": {"cache_salt": "a"}}, ("tenant 'acme' has no kv_quality and no limit: expected cache",)),
    *(
        ("tenants", 2, {"acme": {"cache_salt": "a", key: value}}, (f"{key} is {shown}", "expected a number of GB"))
        for key, value, shown in (
            *(("gpu_gb", -1, "-1"), ("host_gb", "4", "'4'"), ("ssd_gb", 10**400, "1000000000")),
            *(("gpu_gb", True, "True"), ("gpu_gb", math.nan, "nan"), ("ssd_gb", 1e10, "10000000000.0")),
        )
    ),
    (
        "tenants",
        2,
        {"acme": {"cache_salt": "a", "kv_quality": 2}},
        ("tenant 'acme': kv_quality is 2: expected 'exact', or a",),
    ),
    (
        "tenants",
        2,
        {name: {"cache_salt": "a", "kv_quality": 0.9} for name in ("acme", "law")},
        ("tenants 'acme' and 'law' have the same cache_salt: expected one for each",),
    ),
    # ---- fields of requests
    ("kv_quality", 400, "exakt", ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, "Exact", ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, "", ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, 0, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, -0.1, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, 1.01, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, math.nan, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, True, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, ["exact"], ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, {"exact": 1}, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_quality", 400, "x" * 10_000, ("kv_quality is ", "expected 'exact', or a number above 0, at most 1")),
    ("kv_retention_seconds", 400, 0, ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, -1, ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, 86_401, ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, math.nan, ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, True, ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, "60", ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    ("kv_retention_seconds", 400, [60], ("kv_retention_seconds is ", "expected seconds above 0, at most 86400")),
    # ---- bodies and URLs of /evicpress
    ("melt", 404, {}, ("'melt'", "tree, outline, node", "check, evict, tiers, flush", "requests, open_shadow")),
    ("open_shadow", 400, {}, ("token_ids is missing",)),
    ("tree", 400, {"depth": "2"}, ("'depth'", "accepted are after, limit")),
    ("check", 400, {"repair": True}, ("'repair'",)),
    ("explain", 400, {"node_id": "1", "tokens": "1"}, ("'tokens'", "node_id")),
    ("journal", 400, {"since": "-1"}, ("since", "'-1'", ">= 0")),
    ("journal", 400, {"limit": "0"}, ("limit", "'0'", ">= 1")),
    ("node", 400, {}, ("node_id is missing", ">= 0")),
    ("node", 400, {"node_id": "9" * 5000}, ("18 digits",)),
    ("node", 400, {"node_id": "1", "positions": "maybe"}, ("positions", "'maybe'", "true or false")),
    ("node", 400, {"node_id": "1", "values": "1"}, ("'values'", "node_id, positions, tokens")),
    ("node", 404, {"node_id": "99"}, ("node 99", "/evicpress/tree")),
    ("compress", 404, {"node_id": "99", "form": "knorm@0.5"}, ("node 99",)),
    ("explain", 404, {"node_id": "9"}, ("node 9",)),
    ("compress", 400, {"node_id": "1"}, ("form is missing", "keydiff@0.5")),
    ("compress", 400, {"node_id": "1", "form": "gzip@0.5"}, ("'gzip@0.5'", "keydiff")),
    ("compress", 400, {"node_id": "1", "form": "knorm@0.5", "force": True}, ("'force'", "node_id, form")),
    ("compress", 409, {"node_id": "2", "form": "knorm@0.5"}, ("node 2", "locked")),
    ("compress", 409, {"node_id": "3", "form": "knorm@0.5"}, ("node 3", "knorm@0.5", "under the 64")),
    ("evict", 400, {}, ("num_slots is missing", ">= 1")),
    ("evict", 400, {"num_slots": 0}, ("num_slots is 0", ">= 1")),
    ("tiers", 400, {"tier": "gpu"}, ("'tier'", "accepted are none")),
    ("flush", 400, {}, ("tier is missing", "gpu, host, ssd")),
    ("flush", 400, {"tier": "external"}, ("'external'", "gpu, host, ssd")),
    ("flush", 400, {"tier": 0}, ("tier is 0",)),
    ("flush", 400, {"tier": ["gpu"]}, ("['gpu']",)),
    ("flush", 409, {"tier": "ssd"}, ("no SSD tier",)),
    ("demote", 400, {"node_id": "1"}, ("tier is missing", "host, ssd")),
    ("demote", 400, {"node_id": "1", "tier": "gpu"}, ("'gpu'", "host, ssd")),
    ("demote", 400, {"node_id": "1", "tier": "external"}, ("'external'",)),
    ("demote", 400, {"tier": "host"}, ("node_id is missing",)),
    ("demote", 400, {"node_id": "1", "tier": "ssd", "codec": "int3"}, ("'int3'", "raw, lossless, int8")),
    ("demote", 404, {"node_id": "99", "tier": "host"}, ("node 99",)),
    ("demote", 409, {"node_id": "2", "tier": "host"}, ("node 2 cannot be demoted now", "locked")),
    ("demote", 409, {"node_id": "3", "tier": "host"}, ("the host tier is full",)),
    ("attach_ssd", 400, {"gb": 1}, ("dir is missing", "absolute path")),
    ("attach_ssd", 400, {"dir": "kv", "gb": 1}, ("'kv'", "absolute path")),
    ("attach_ssd", 400, {"dir": "/kv"}, ("gb is missing", "GB")),
    ("attach_ssd", 400, {"dir": "/kv", "gb": 0}, ("gb is 0", "above 0")),
    ("attach_ssd", 400, {"dir": "/kv", "gb": 1, "write_gb_per_day": -1}, ("write_gb_per_day is -1",)),
    ("attach_ssd", 400, {"dir": "/kv", "gb": 1, "sync": "none"}, ("'sync'", "dir, gb, write_gb_per_day")),
    ("detach_ssd", 400, {"dir": "/kv"}, ("'dir'",)),
    ("detach_ssd", 409, {}, ("no SSD tier to detach",)),
    ("requests", 400, {"positions": "true"}, ("positions is true without rid",)),
    ("requests", 400, {"rid": "a", "offset": "5"}, ("offset is given without positions",)),
    ("requests", 400, {"rid": "a", "after": "5"}, ("after and limit list requests",)),
    ("requests", 400, {"rid": "a", "limit": "5"}, ("after and limit list requests",)),
    ("requests", 400, {"rid": "a", "positions": "true", "offset": "-1"}, ("offset is '-1'",)),
    ("requests", 400, {"limit": "0"}, ("limit is '0'",)),
    ("requests", 400, {"after": "many"}, ("after is 'many'",)),
    *(
        (op, 400, {**given, "hold_seconds": seconds}, ("hold_seconds is", "a number of seconds from 0 to 86400"))
        for op, given in (
            ("demote", {"node_id": 1, "tier": "ssd"}),
            ("compress", {"node_id": 1, "form": "keydiff@0.5"}),
        )
        for seconds in (-1, 86401, math.nan, math.inf, True, "60", None, [60], 10**400)
    ),
    ("tree", 400, {"limit": "0"}, ("limit is '0'", ">= 1")),
    ("tree", 400, {"cursor": "-1"}, ("cursor is '-1'", "expected")),
    ("tree", 400, {"cursor": "1", "after": "1"}, ("and cursor are two names", "expected one of them")),
    ("outline", 400, {"limit": "0"}, ("limit is '0'", ">= 1")),
    ("outline", 400, {"cursor": "-1"}, ("cursor is '-1'", "expected")),
    ("outline", 400, {"cursor": "1", "after": "1"}, ("and cursor are two names", "expected one of them")),
    ("journal", 400, {"limit": "0"}, ("limit is '0'", ">= 1")),
    ("journal", 400, {"cursor": "-1"}, ("cursor is '-1'", "expected")),
    ("journal", 400, {"cursor": "1", "since": "1"}, ("and cursor are two names", "expected one of them")),
    ("requests", 400, {"limit": "0"}, ("limit is '0'", ">= 1")),
    ("requests", 400, {"cursor": "-1"}, ("cursor is '-1'", "expected")),
    ("requests", 400, {"cursor": "1", "after": "1"}, ("and cursor are two names", "expected one of them")),
    ("profiles", 400, {"limit": "0"}, ("limit is '0'", ">= 1")),
    ("profiles", 400, {"cursor": "-1"}, ("cursor is '-1'", "expected")),
    ("profiles", 400, {"cursor": "1", "after": "1"}, ("and cursor are two names", "expected one of them")),
    ("requests", 400, {"rid": "a", "cursor": "5"}, ("after and limit list requests",)),
    *((op, 400, {**ARGUMENTS[op], "soon": 1}, ("'soon' is not known here", "accepted are")) for op in PROFILE_NAMES),
    ("open_shadow", 400, {}, ("token_ids is missing", "a list of token ids")),
    ("open_shadow", 400, {"token_ids": []}, ("token_ids is []",)),
    ("open_shadow", 400, {"token_ids": "1,2"}, ("token_ids is '1,2'",)),
    ("open_shadow", 400, {"token_ids": {"0": 1}}, ("token_ids is {",)),
    ("open_shadow", 400, {"token_ids": [1, -1]}, ("token_ids has -1", "at least 0")),
    ("open_shadow", 400, {"token_ids": [1, True]}, ("token_ids has True",)),
    ("open_shadow", 400, {"token_ids": [1, 2.0]}, ("token_ids has 2.0",)),
    ("open_shadow", 400, {"token_ids": [1, None]}, ("token_ids has None",)),
    ("open_shadow", 400, {"token_ids": [MAX_TOKEN + 1]}, (f"token_ids has {MAX_TOKEN + 1}",)),
    ("open_shadow", 400, {"token_ids": ["x" * 5000]}, ("token_ids has 'xxx",)),
    ("open_shadow", 400, {"token_ids": [1], "extra_key": 3}, ("extra_key is 3", "a string or null")),
    ("make_shadow_form", 400, {"form": "knorm@0.5"}, ("shadow_id is missing",)),
    ("make_shadow_form", 400, {"shadow_id": 1}, ("form is missing",)),
    ("drop_shadow_form", 400, {"shadow_id": 1, "form": "gone"}, ("'gone'",)),
    ("close_shadow", 400, {}, ("shadow_id is missing",)),
    ("close_shadow", 400, {"shadow_id": 1, "adopt": 1}, ("adopt is 1",)),
    ("profile", 400, {}, ("key is missing", "32 hex digits")),
    ("profile", 400, {"key": KEY[:-1]}, (KEY[:-1], "32 hex digits")),
    ("profile", 400, {"key": " " * 32}, ("32 hex digits",)),
    ("profile", 400, {"key": "ab " * 10 + "ab"}, ("32 hex digits",)),
    ("profile", 400, {"key": 7}, ("key is 7",)),
    ("put_profile", 400, {}, ("profile is None",)),
    ("put_profile", 400, {"profile": {**PROFILE.to_json(), "num_tokens": 100}}, ("num_tokens is 100", "blocks of 64")),
    ("put_profile", 400, {"profile": PROFILE.to_json(), "is_fresh": 2}, ("is_fresh is 2",)),
    ("note_observed", 400, {"key": KEY}, ("pairs has None", "[predicted, observed]")),
    ("note_observed", 400, {"key": KEY, "pairs": [[0.5]]}, ("pairs has [0.5]",)),
    ("note_observed", 400, {"key": KEY, "pairs": [[0.5, 1.5]]}, ("pairs has [0.5, 1.5]", "from 0 to 1")),
    ("note_observed", 400, {"key": KEY, "pairs": [[-0.1, 1]]}, ("pairs has [-0.1, 1]",)),
    ("note_observed", 400, {"key": KEY, "pairs": [[float("nan"), 1]]}, ("pairs has [nan, 1]",)),
    ("note_observed", 400, {"key": KEY, "pairs": [["0.5", 1]]}, ("pairs has ['0.5', 1]",)),
    ("note_observed", 400, {"key": KEY, "pairs": {"0.5": 1}}, ("pairs has {",)),
    ("note_failed", 400, {"key": None}, ("key is None",)),
)


def _by_flags(given: object, folder: Path) -> None:
    assert isinstance(given, dict)
    EvicPressConfig.from_flags(**{"policy": "evicpress", **given})


def _by_file(flag: str) -> Callable[[object, Path], None]:
    def check(content: object, folder: Path) -> None:
        path = folder / "given.json"
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        if flag == "policy_config":
            has_policy = isinstance(content, dict) and "policy" in content
            EvicPressConfig.from_flags(None if has_policy else "evicpress", str(path))
        else:
            EvicPressConfig.from_flags("evicpress", **{flag: str(path)})  # type: ignore[arg-type]

    return check


def _by_quality(given: object, folder: Path) -> None:
    assert not asks_exact({"kv_quality": given})
    check_quality({"kv_quality": given})


def _by_retention(given: object, folder: Path) -> None:
    assert retention_s({"kv_retention_seconds": given}) == 0.0
    check_retention({"kv_retention_seconds": given})


DOORS = {
    "flags": _by_flags,
    **{flag: _by_file(flag) for flag in ("policy_config", "quality_curves", "tenants")},
    "kv_quality": _by_quality,
    "kv_retention_seconds": _by_retention,
}
"""Each raises ValueError; every other door is an operation of ``/evicpress``."""


@pytest.mark.parametrize(("door", "status", "given", "words"), TABLE, ids=[row[0] for row in TABLE])
def test_a_refusal_is_one_sentence_that_names_the_value_and_what_is_accepted(
    tmp_path: Path, door: str, status: int, given: object, words: tuple[str, ...]
) -> None:
    if door in DOORS:
        with pytest.raises(ValueError, match=".") as raised:
            DOORS[door](given, tmp_path)
        reason = str(raised.value)
    else:
        assert isinstance(given, dict)
        cache = FakeCache()
        found, body = answer(cache, door, given)
        assert (found, list(body)) == (status, ["error"])
        assert set(cache.forms.values()) == {"exact"} and (cache.flushed, cache.ssd) == ([], None)
        reason = body["error"]["reason"]  # type: ignore[index]
    assert [word for word in words if word not in reason] == [], reason
    assert "\n" not in reason and len(reason) < 1000


def test_every_operation_and_every_file_has_rows() -> None:
    doors = {row[0] for row in TABLE}
    assert {name for name, operation in OPERATIONS.items() if operation.arguments} - doors == {"news"}
    assert set(DOORS) <= doors
