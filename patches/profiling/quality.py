"""Quality of contexts for the policy, and a recorder of real requests for the profiler."""

from __future__ import annotations

import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import orjson
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Form
from sglang_evicpress.introspect.arguments import PAGE_PROFILES, IntrospectionError
from sglang_evicpress.patches.profiling.context_search import ContextSearch
from sglang_evicpress.patches.profiling.profiled_nodes import ProfiledNodes
from sglang_evicpress.patches.tree.changes import Signal
from sglang_evicpress.patches.tree.greedy_answers import is_plainly_greedy
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import first_outside, is_lossy, mean_size_of, path_to, start_of, tokens_to
from sglang_evicpress.patches.tree.node_kv import NodeKV
from sglang_evicpress.patches.tree.types import LogicalTime, Node, Scheduler, ServedRequest
from sglang_evicpress.policy import policy_info
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.policy.quality_target import Share
from sglang_evicpress.quality.catalog import Catalog
from sglang_evicpress.quality.drift import DriftMonitor
from sglang_evicpress.quality.expectation import Expectation
from sglang_evicpress.quality.profile import BLOCK_TOKENS, Profile, context_keys
from sglang_evicpress.quality.recorder import Query, Recorder
from sglang_evicpress.quality.store import ProfileStore, StoreError
from sglang_evicpress.tiers.entry.copies import Copy, ExternalCopy
from sglang_evicpress.tiers.entry.identity import KEY_BYTES

logger = logging.getLogger(__name__)

MIN_CONTEXT_TOKENS = 256  # a shorter shared prefix is not worth a profile
MAX_KNOWN_CONTEXTS = 64  # tokens of contexts that shadows were made of, to find their nodes by
MAX_NODES_SHOWN = 256
DEFAULT_PAUSE_S = 10.0  # what unprofiled nodes are taken for changes no more often,
DEFAULT_PAUSE_S_PER_NODE = 3e-3  # nor than takes a hundredth of the time: each node costs some 30 us
TOLERANCE = 0.01  # nor by less, as what is expected of measured contexts


def _read_profiles(path: Path, identity: bytes) -> bytes:
    """The profiles of the store at ``path``, in its order, as a JSON list; an empty one where it cannot be read."""
    try:
        profiles = ProfileStore(path, identity).load()
        return orjson.dumps([profile.to_json() for profile in profiles])
    except (StoreError, OSError, ValueError) as error:  # at start it could be used: see server_args.py
        logger.error("evicpress: no profile is read: %s", error)
        return b"[]"


class QualityTree(Protocol):
    """The cache, as far as contexts and profiles of it are concerned."""

    nodes: dict[int, Node]
    root_node: Node
    page_size: int
    vocab_size: int
    name_profiles: Callable[[object], bytes]

    @property
    def scheduler(self) -> Scheduler | None: ...
    def _steps(self, key: RadixKey) -> list[tuple[Node, int]]: ...


class PolicyRefresh(Protocol):
    """Policy that is told of changed expectations."""

    def read_mean_curve(self) -> None: ...
    def expect_anew(self, *, forms_changed: bool) -> None: ...


class Ranks(Protocol):
    """Tensor-parallel ranks, which must know alike."""

    @property
    def is_first_rank(self) -> bool: ...
    def as_first_rank(self, value: bytes) -> bytes: ...


@dataclass(eq=False, repr=False)
class Quality:
    """Profiles of contexts, and what nodes of the tree are worth by them. Everything here runs on the scheduler thread.

    ``identify_profiles`` is to be called before the first request. ``changed`` is told of nodes of which more is known,
    ``judged`` of answers that were scored.
    """

    tree: QualityTree
    time: LogicalTime
    policy: PolicyRefresh
    mark_dirty: Callable[[], None]
    ranks: Ranks
    config: EvicPressConfig
    forms: tuple[Form, ...]
    changed: Callable[[Node], None]

    def __post_init__(self) -> None:
        self.profile_identity = bytes(KEY_BYTES)
        self.counts = dict.fromkeys(("recorded", "observed", "drifted", "profiled", "failed"), 0)
        self._prior = None if self.config.curves is None else Curves.from_json(self.config.curves)
        self._contexts: OrderedDict[bytes, tuple[array[int], str | None]] = OrderedDict()
        self._node_of_context: dict[bytes, int] = {}
        self._is_complete: dict[bytes, tuple[Profile, bool]] = {}  # whether all forms were measured in it
        self.judged = Signal[[Sequence[tuple[float, float]]]]()
        self._profiled_nodes = ProfiledNodes()
        self._sought = ContextSearch(self.tree.nodes, self._spells, self._attach)
        self._stale: list[bytes] = []  # contexts to expect anew of, since others were measured; the next one last
        self._is_default_stale = False
        self._default_s = -DEFAULT_PAUSE_S
        self.forget_profiles()
        self._default_vector = [0.0] * len(self.forms)  # one object, to which all nodes without a curve refer
        self._set_default(Expectation.of((self.catalog.default,), self.forms))

    @property
    def mean_curve(self) -> Sequence[float]:
        """The quality of every form of the menu, over all contexts that were profiled."""
        return Expectation.of((self.catalog.mean,), self.forms).vector

    def forget_profiles(self) -> None:
        """Nothing is known of any context, nor was any question asked."""
        self.catalog = Catalog(self._prior)
        self.recorder = Recorder() if self.config.profiles_online else None
        self._watch = DriftMonitor(self.config.profiles.drift_threshold)
        self._contexts.clear()
        self._node_of_context.clear()

    def identify_profiles(self) -> bool:
        """Begin to use the profiles of this model, tokenizer and version of the forms; what is known of another goes.
        False: they are as before.

        The file is only read here, by rank 0, which tells the others: each could find other profiles in it, or none.
        The process that answers HTTP writes it, so that the scheduler never waits for a disk once it serves."""
        identity = self.tree.name_profiles(None if self.tree.scheduler is None else self.tree.scheduler.tokenizer)
        if identity == self.profile_identity:
            return False
        self.profile_identity = identity
        self.forget_profiles()
        if self.config.profiles.path is not None:
            is_reader = self.ranks.is_first_rank
            text = _read_profiles(Path(self.config.profiles.path), identity) if is_reader else b""
            for profile in orjson.loads(self.ranks.as_first_rank(text)):
                self.catalog.put(Profile.from_json(profile))
        self.renew_default()
        self.clear()
        for node in self.tree.nodes.values():
            node.kv.profiles, node.kv.curve = {}, None
            self.changed(node)
        return True

    # ---- curves

    def renew_default(self) -> None:
        """Unprofiled nodes are taken for what the catalog says now."""
        self._is_default_stale = False
        self._default_s = self.time.now_s
        before, now = self.default_expectation, Expectation.of((self.catalog.default,), self.forms)
        if policy_info(self.config.policy).has_mean_curve:  # it goes by one curve for all nodes
            self.policy.read_mean_curve()
        if now.differs(before, TOLERANCE):
            self._set_default(now)
            self.policy.expect_anew(forms_changed=before.known != now.known)
        self.mark_dirty()

    def _set_default(self, expectation: Expectation) -> None:
        self._default_vector[:] = expectation.vector
        self.default_expectation = replace(expectation, vector=self._default_vector)

    def refresh_default(self) -> None:
        """Called as the clock goes on."""
        pause_s = max(DEFAULT_PAUSE_S, DEFAULT_PAUSE_S_PER_NODE * len(self.tree.nodes))
        if self._is_default_stale and self.time.now_s - self._default_s >= pause_s:
            self.renew_default()
            rest = set(self._stale)
            self._stale = [key for key in self._profiled_nodes if key not in rest] + self._stale

    def expectation_of(self, node: Node) -> Expectation:
        return self.default_expectation if node.kv.curve is None else node.kv.curve

    def quality_of(self, node: Node) -> float:
        """Quality of a node's present form."""
        kv: NodeKV = node.kv
        return 1.0 if kv.form.is_exact else self._quality_as(node, kv.form, mean_size_of(node))

    def quality_of_copy(self, node: Node, copy: Copy | ExternalCopy) -> float:
        """Quality of a node's copy on a lower tier."""
        return 1.0 if copy.form.is_exact else self._quality_as(node, copy.form, copy.mean_slots)

    def shares_of(self, steps: Iterable[tuple[Node, int]]) -> list[Share]:
        """Tokens of the steps of a path, from its beginning, and how many of them are lost. What was computed upon a
        lossy prefix is no better than the mean of that."""
        parts = list[Share]()
        num_tokens, lost = 0, 0.0
        for node, matched in steps:
            quality = self._quality_of_first(node, matched)
            if node.kv.is_lossy_prefix:
                quality = min(quality, node.kv.prefix_quality, 1.0 - lost / num_tokens if num_tokens else 1.0)
            parts.append(Share(matched, matched * (1.0 - quality)))
            num_tokens += matched
            lost += parts[-1].lost
        return parts

    def _quality_of_first(self, node: Node, num_tokens: int) -> float:
        """Quality of the piece that a split after so many tokens leaves, which may hold less than its share."""
        layout = node.kv.layout
        if layout is None or node.kv.form.is_exact or num_tokens == len(node.key):
            return self.quality_of(node)
        return self._quality_as(node, node.kv.form, layout.mean_before(num_tokens), num_tokens)

    def _quality_as(self, node: Node, form: Form, num_slots: float, num_tokens: int | None = None) -> float:
        if form.is_uneven:  # what whole numbers and pages leave of the mean is no loss
            num_slots = math.ceil(num_slots / self.tree.page_size) * self.tree.page_size
        kept = min(form.kept_fraction, num_slots / (num_tokens or len(node.key)))  # a piece of a split may hold less
        return self.expectation_of(node).quality(replace(form, kept_fraction=kept)) if kept > 0.0 else 0.0

    def find_profiles(self, leaf: Node) -> None:
        """A new leaf may complete contexts that were profiled before. Nobody knows any more what the lossy prefix was
        worth that one below the GPU was computed on: it may have been the worst form that was measured."""
        if leaf.kv.is_lossy_prefix and leaf.value is None:
            measured = [value for value in self.default_expectation.vector if value > 0.0]
            leaf.kv.prefix_quality = min(measured, default=0.0)
        if not len(self.catalog) or leaf.kv.is_shadow or not leaf.kv.is_text:
            return
        for key in context_keys(self.profile_identity, leaf.key.extra_key, tokens_to(leaf), start_of(leaf)):
            if key in self.catalog:
                self._attach(key, path_to(leaf))

    def split_profiles(self, upper: Node, lower: Node) -> None:
        """Split the profiles of a node: those that end in the upper part are not the lower one's."""
        if not lower.kv.profiles:
            upper.kv.profiles = {}
            return
        self._profiled_nodes.split(upper, lower, start_of(lower))
        self._expect_of(upper)
        self._expect_of(lower)

    def _attach(self, key: bytes, path: Iterable[Node]) -> None:
        """The context is spelled by ``path``, its nodes in any order; it may end within the last."""
        profile = self.catalog.get(key)
        if profile is None:
            return
        for node in path:
            self._profiled_nodes.add(node, key, profile.num_tokens)
            self._expect_of(node)
            self.changed(node)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._profiled_nodes.forget(node)

    def clear(self) -> None:
        """Every node is gone."""
        self._profiled_nodes.clear()
        self._sought.clear()
        self._stale.clear()

    def _expect_of(self, node: Node) -> None:
        """By the contexts that make up most of the node."""
        least = start_of(node) + len(node.key) / 2
        known_keys = [key for key, length in node.kv.profiles.items() if length > least and key in self.catalog]
        curves = [self.catalog.curves_of(key) for key in known_keys]
        node.kv.curve = Expectation.of(curves, self.forms) if curves else None

    def _renew(self, key: bytes) -> None:
        """Expect of the context's nodes what all that was measured since says, where that is something else."""
        for node in self._profiled_nodes.of(key).values():
            before: Expectation | None = node.kv.curve
            self._expect_of(node)
            now: Expectation | None = node.kv.curve
            if before is not None and now is not None and not now.differs(before, TOLERANCE):
                node.kv.curve = before
            else:
                self.changed(node)

    def _spells(self, node: Node, profile: Profile) -> bool:
        """True if the tokens to the node begin with the profile's context."""
        tokens = tokens_to(node)[: profile.num_tokens]
        keys = context_keys(self.profile_identity, node.key.extra_key, tokens, profile.num_tokens - BLOCK_TOKENS)
        return keys[-1:] == [profile.key]

    def know_context(self, key: bytes, tokens: array[int], namespace: str | None) -> None:
        """A shadow is made of it: a profile of it may follow."""
        self._contexts[key] = (tokens, namespace)
        self._contexts.move_to_end(key)
        while len(self._contexts) > MAX_KNOWN_CONTEXTS:
            self._contexts.popitem(last=False)

    # ---- what real requests ask

    def note_question(self, req: ServedRequest, path: list[Node], num_tokens: int) -> None:
        """A request runs on ``num_tokens`` that the tree had, spelled by ``path``."""
        if self.recorder is not None:
            predicted = None
            if any(map(is_lossy, path)):
                parts = self.shares_of([(node, len(node.key)) for node in path])
                predicted = 1.0 - math.fsum(part.lost for part in parts) / sum(part.num_tokens for part in parts)
            req.evicpress_use = (num_tokens, predicted)

    def record_answer(self, req: ServedRequest) -> None:
        """A request has its answer; nothing of it ever leaves this process but to the profiler beside it. What is more
        than text is not recorded: it could not be asked again."""
        shared, predicted = getattr(req, "evicpress_use", (0, None))
        unit = math.lcm(BLOCK_TOKENS, self.tree.page_size)
        end = min(shared, len(req.origin_input_ids) - 1) // unit * unit  # a retracted one may find its own answer
        if self.recorder is None or end < MIN_CONTEXT_TOKENS or req.lora_id is not None or not req.output_ids:
            return
        if req.multimodal_inputs is not None or req.input_embeds is not None:
            return
        if any(first_outside(row, self.tree.vocab_size) is not None for row in (req.origin_input_ids, req.output_ids)):
            return
        question = req.origin_input_ids[end:]
        if len(question) > self.recorder.max_query_tokens or is_shadow_name(req.extra_key):
            return
        tokens = req.origin_input_ids[:end]
        (key,) = context_keys(self.profile_identity, req.extra_key, tokens, end - BLOCK_TOKENS)
        self.catalog.touch(key)
        answer = req.output_ids if is_plainly_greedy(req.sampling_params, req.custom_logit_processor) else ()
        self.recorder.record(key, tokens, req.extra_key, Query(question, answer, predicted))
        node = req.last_node
        while node is not None and node is not self.tree.root_node and start_of(node) >= end:
            node = node.parent
        if node is not None and node is not self.tree.root_node:
            self._node_of_context[key] = node.id
        if len(self._node_of_context) > 2 * len(self.recorder):
            self._forget_contexts()
        self.counts["recorded"] += 1

    def _forget_contexts(self) -> None:
        """Forget contexts that the recorder has forgotten."""
        if self.recorder is None:
            return
        for key in [key for key in self._node_of_context if self.recorder.context_of(key) is None]:
            del self._node_of_context[key]

    # ---- what can be asked

    def next_profiling_job(self) -> dict[str, object]:
        """Next job of the profiler: an object with ``kind`` observe or profile, or an empty one."""
        if self.recorder is None:
            return {}
        self._forget_contexts()
        if not self._has_free_cycles():
            return {}
        weights = {}
        for key, node_id in self._node_of_context.items():
            node = self.tree.nodes.get(node_id)
            weights[key] = 0.0 if node is None else max(node.kv.weight, 1e-300)
        job = self._watch.next_job(self.recorder, {key for key in weights if self._is_profiled(key)}, weights)
        context = None if job is None else self.recorder.context_of(job.key)
        if job is None or context is None:
            return {}
        return {
            "kind": "observe" if job.why == "observe" else "profile",
            "why": job.why,
            "key": job.key.hex(),
            "token_ids": list(context.tokens),
            "extra_key": context.namespace,
            "num_lossy_hits": context.num_lossy_hits,
            "queries": [
                {"token_ids": list(query.tokens), "answer": list(query.answer), "predicted": query.predicted}
                for query in job.queries
            ],
            "forms": [str(form) for form in self.forms[1:]],
        }  # fmt: skip

    def _is_profiled(self, key: bytes) -> bool:
        """True if every form of the menu was measured, as far as it can be: a profile may be of other presses."""
        profile = self.catalog.get(key)
        if profile is None or self._watch.was_profiled(key):
            return profile is not None
        known = self._is_complete.get(key)
        if known is None or known[0] is not profile:
            if len(self._is_complete) > 2 * len(self._node_of_context):
                self._is_complete.clear()
            curves = self.catalog.curves_of(key)
            known = self._is_complete[key] = profile, all(curves.knows(form) for form in self.forms[1:])
        return known[1]

    def note_observed(self, key: bytes, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
        """Answers about a context were scored under its exact KV: (predicted, observed) qualities."""
        is_drifted = False
        for predicted, observed in pairs:
            is_drifted = self._watch.observe(key, predicted, observed)
        self.judged(pairs)
        self.counts["observed"] += len(pairs)
        self.counts["drifted"] += is_drifted
        return {"is_drifted": is_drifted}

    def note_failed(self, key: bytes) -> dict[str, object]:
        """A job came to nothing."""
        self._watch.failed(key)
        self.counts["failed"] += 1
        return {}

    def put_profile(self, profile: Profile, is_fresh: bool) -> dict[str, object]:
        """A context was profiled. ``is_fresh``: by queries that replace what was measured before."""
        earlier = self.catalog.get(profile.key)
        profile = profile.completed(earlier) if is_fresh else profile.merged(earlier)
        self.catalog.put(profile)
        self._is_default_stale = True
        if earlier is None and len(self.catalog) == 1:
            self.renew_default()
        context = self.recorder.context_of(profile.key) if self.recorder is not None else None
        if context is not None and is_fresh:  # else there is more to be measured, and what was seen to drift still does
            self._watch.profiled(profile.key, num_lossy_hits=context.num_lossy_hits, asked=profile.query_set)
        nodes = self._profiled_nodes.of(profile.key)
        known = self._contexts.get(profile.key)
        if known is not None:
            steps = self.tree._steps(RadixKey(*known).page_aligned(self.tree.page_size))
            if sum(matched for _, matched in steps) == len(known[0]):
                nodes |= {node.id: node for node, _ in steps}
        self._attach(profile.key, nodes.values())
        if known is None and not nodes:
            self._sought.add(profile)
            nodes = self._profiled_nodes.of(profile.key)
        self.counts["profiled"] += 1
        self.mark_dirty()
        return {"identity": self.profile_identity.hex(), "profile": profile.to_json(), "num_nodes": len(nodes)}

    def advance(self) -> None:
        """Look on for contexts that were profiled, and expect anew of one; called once a round."""
        if self._sought.advance():
            self.mark_dirty()
        if self._stale:
            self._renew(self._stale.pop())

    def list_profiles(self, after: bytes = b"", limit: int = PAGE_PROFILES) -> dict[str, object]:
        forms = self.forms[1:]
        page = self.catalog.page(after, min(limit, PAGE_PROFILES))
        default = self.default_expectation
        return {
            "identity": self.profile_identity.hex(),
            "page_size": self.tree.page_size,
            "has_geometry": self.config.geometry is not None,
            "file": self.config.profiles.path,
            "prior": None if self.config.curves is None else dict(self.config.curves),
            "forms": [str(form) for form in forms],
            "default": {
                str(form): quality
                for index, (form, quality) in enumerate(zip(forms, default.vector[1:], strict=True), 1)
                if default.known >> index & 1
            },
            "online_profiling": self.recorder is not None,
            "num_recorded_contexts": 0 if self.recorder is None else len(self.recorder),
            "profiles": [
                {
                    "key": profile.key.hex(),
                    "num_tokens": profile.num_tokens,
                    "num_forms": len(profile.forms),
                    "scorer": profile.scorer,
                    "query_set": profile.query_set,
                    "num_queries": profile.num_queries,
                    "measured_s": profile.measured_s,
                }
                for profile in page
            ],
            "num_profiles": len(self.catalog),
            "next": page[-1].key.hex() if len(page) == min(limit, PAGE_PROFILES) else None,
        }

    def show_profile(self, key: bytes) -> dict[str, object]:
        profile = self.catalog.get(key)
        if profile is None:
            raise IntrospectionError(404, f"context {key.hex()} has no profile: GET /evicpress/profiles lists them")
        curves = self.catalog.curves_of(key)
        curve: Mapping[str, object] = {
            str(form): {
                "count": seen.count,
                "mean": seen.mean,
                "std": math.sqrt(seen.variance),
                "expected": curves.quality(form),
            }
            for form, seen in profile.forms.items()
        }
        nodes = list(islice(self._profiled_nodes.of(key), MAX_NODES_SHOWN))
        return {**profile.to_json(), "curve": curve, "nodes": nodes}

    def _has_free_cycles(self) -> bool:
        """EvicPress section 4.3: fewer requests run than could, and none waits."""
        scheduler = self.tree.scheduler
        if scheduler is None:
            return False
        num_running = len(scheduler.running_batch.reqs)
        return not scheduler.waiting_queue and num_running < scheduler.max_running_requests
