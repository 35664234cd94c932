"""Admission in a round, beyond SGLang's own rules: a request whose prefix is on its way is passed over, so is
one whose missing prefix another computes, and one whose load has no room yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat.release import REQUEST_KV
from sglang_evicpress.patches.tiers.prefetches import WINDOW, Prefetch
from sglang_evicpress.patches.tree.exact_requests import computes_lossy, first_lossy, is_exact_request
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import path_to
from sglang_evicpress.patches.tree.types import Attached, CostTerms, Node, QueuedRequest, Request, Scheduler

if TYPE_CHECKING:
    from sglang_evicpress.patches.scheduler.hooks import HookedAdder, HookedScheduler

LEAST_SHARED = 64
"""Tokens that two requests must both miss for one to wait until the other has computed them; and half of what it
misses, as the other may have far more to compute."""

DEFER_S = 1.0
"""So long a request whose load has no room is passed over, from when it could have run; others could go on for ever."""

COMPUTING_S = 1.0
"""A request is taken to compute for so long at least, and for ``COMPUTING_TIMES`` as long as predicted."""

COMPUTING_TIMES = 3.0


class KnownPrefetches(Protocol):
    """Prefetches of the requests that wait, by ``id()`` of the request."""

    by_request: dict[int, Prefetch]
    is_in_order: bool

    def is_passed_over(self, req: Request) -> bool: ...


class Prefetching(Protocol):
    """Getting ready what waiting requests will use."""

    def begin(self, req: Request) -> None: ...
    def is_prefetching(self, req: Request, *, has_turn: bool = True) -> bool: ...


class GivingWay(Protocol):
    """Requests that give way to users'."""

    def receive_background(self, req: Request) -> None: ...
    def hide_background(self, scheduler: Scheduler) -> None: ...
    def show_background(self, scheduler: Scheduler) -> None: ...
    def should_defer(self, req: Request) -> bool: ...


class LockedTree(Attached, Protocol):
    """The tree, whose paths can be locked; ``disable``: nothing is cached."""

    disable: bool

    def inc_lock_ref(self, node: Node) -> object: ...
    def dec_lock_ref(self, node: Node) -> object: ...
    def known_of(self, req: Request) -> list[tuple[Node, int]]: ...
    def steps_of_waiting(self, req: Request) -> list[tuple[Node, int]]: ...


class ExpectedHits(Protocol):
    """Hits of requests that wait."""

    def on_queued(self, req: object, steps: Sequence[tuple[Node, int]]) -> None: ...


@dataclass(eq=False, repr=False)
class Admission:
    """Chooses who is passed over. ``has_room``: so many slots are free or can be; ``is_freeing_host``: host memory
    will become free of itself; ``available_size``: slots that are
    free; ``is_in_order``: SGLang takes the queue as it is; ``most_new_tokens`` that it keeps room for; ``note_adapter``
    is told of the adapter of every request; ``now_s`` is the time by which all ranks decide."""

    tree: LockedTree
    prefetches: KnownPrefetches
    prefetcher: Prefetching
    background: GivingWay
    hits: ExpectedHits
    terms: CostTerms
    note_adapter: Callable[[str | None], object]
    has_room: Callable[[int], bool]
    is_freeing_host: Callable[[], bool]
    available_size: Callable[[], int]
    is_in_order: Callable[[HookedScheduler], bool]
    counts: Counter[str]
    now_s: Callable[[], float]
    _: KW_ONLY
    has_host: bool
    page_size: int
    most_new_tokens: int

    def __post_init__(self) -> None:
        self.computing: dict[int, tuple[QueuedRequest, float]] = {}  # that prefill, by id(), until when at most
        self._queue: list[Request] = []  # the head of it, as it was before some of it was hidden
        self._behind: list[Request] = []  # all behind the head
        self._passed_over: set[int] = set()  # of the head, by id()
        self._num_hidden = 0
        self._num_to_run: dict[int, int] = {}  # slots that a request needs besides those of its prefix, by id()
        self.is_out_of_room = False  # in this round somebody was deferred
        self.slots_ahead = 0  # that those who were passed over in this round need to run

    def on_queued(self, req: QueuedRequest) -> None:
        """A request has entered the waiting queue: what it would match now gets its hit. Splits and touches nothing."""
        self.note_adapter(req.lora_id)
        if is_shadow_name(req.extra_key):
            self.background.receive_background(req)
            return
        self.hits.on_queued(req, self.tree.steps_of_waiting(req))
        if not self.tree.disable:
            self.prefetcher.begin(req)

    def hide_waiting(self, scheduler: HookedScheduler) -> None:
        """Take those of which nothing new can be said out of the queue until ``show_waiting``: SGLang looks every
        request that waits up in the tree, step by step. Where they are served in the order of the queue, also those for
        whom nothing is got ready yet."""
        self.background.hide_background(scheduler)
        queue = scheduler.waiting_queue
        self.is_out_of_room, self.slots_ahead = False, 0
        known = self.prefetches.by_request
        self._num_to_run = {key: num_slots for key, num_slots in self._num_to_run.items() if key in known}
        if not known:
            return
        self.prefetches.is_in_order = self.is_in_order(scheduler)
        most = WINDOW if self.prefetches.is_in_order else len(queue)
        head, behind = queue[:most], queue[most:]
        passed_over = [req for req in head if self.prefetches.is_passed_over(req)]
        self.slots_ahead = sum(self._num_to_run.get(id(req), 0) for req in passed_over)
        self._num_hidden = len(passed_over) + len(behind)
        if self._num_hidden:
            self._queue, self._behind, self._passed_over = head, behind, {id(req) for req in passed_over}
            scheduler.waiting_queue = [req for req in head if id(req) not in self._passed_over]

    @property
    def hidden(self) -> list[Request]:
        """Requests that wait, and are not in the queue while the next batch is made."""
        return [req for req in self._queue if id(req) in self._passed_over] + self._behind

    def show_waiting(self, scheduler: HookedScheduler) -> None:
        """The queue in its order again, without those that run now; who has come since is behind."""
        if self._num_hidden:
            left_in_queue = scheduler.waiting_queue
            known, left = {id(req) for req in self._queue}, {id(req) for req in left_in_queue} | self._passed_over
            waiting = [req for req in self._queue if id(req) in left]
            scheduler.waiting_queue = waiting + self._behind + [req for req in left_in_queue if id(req) not in known]
            self._num_hidden, self._queue, self._behind, self._passed_over = 0, [], [], set()
        self.background.show_background(scheduler)

    def is_passed_by(self, adder: HookedAdder, req: QueuedRequest) -> bool:
        """True if the batch that is made goes on without a request for now. What it waits for has its turn when there
        is room for it besides those before it in the queue that were passed over."""
        if id(req) not in self.prefetches.by_request:
            return self.background.should_defer(req) or self.is_being_computed(req)
        new_tokens = max(0, min(req.sampling_params.max_new_tokens, self.most_new_tokens) - len(req.output_ids))
        num_to_run = len(req.full_untruncated_fill_ids) - REQUEST_KV.prefix_len(req) + new_tokens + self.page_size
        self._num_to_run[id(req)] = num_to_run
        has_turn = not self.slots_ahead or self.slots_ahead + num_to_run < adder.rem_total_tokens
        is_prefetching = self.prefetcher.is_prefetching(req, has_turn=has_turn)
        if not is_prefetching and (self.background.should_defer(req) or self.is_being_computed(req)):
            return True
        if not is_prefetching and not self.lacks_room(adder, req):
            return False
        self.slots_ahead += num_to_run
        return True

    def note_admitted(self, req: QueuedRequest) -> None:
        """SGLang has put the request into the batch that it makes."""
        if self.prefetches.by_request:
            num_new = len(req.origin_input_ids) - REQUEST_KV.prefix_len(req)
            took_s = self.terms.costs.prefill.marginal_seconds(max(0, num_new), REQUEST_KV.prefix_len(req))
            self.computing[id(req)] = req, self.now_s() + COMPUTING_S + COMPUTING_TIMES * took_s

    def is_being_computed(self, req: QueuedRequest) -> bool:
        """True if another request computes now what this one misses: it is in the tree when that is over."""
        if not self.computing:
            return False
        now = self.now_s()
        for key, (other, until_s) in list(self.computing.items()):
            if now > until_s or other.finished() or other.is_retracted:
                del self.computing[key]
        begin = REQUEST_KV.prefix_len(req) + req.host_hit_length
        tokens = req.origin_input_ids
        end = begin + max(LEAST_SHARED, (len(tokens) - begin) // 2)
        missing = tokens[begin:end]
        if len(missing) < LEAST_SHARED:
            return False
        for other, _ in self.computing.values():
            theirs = other.origin_input_ids
            is_behind = (
                REQUEST_KV.protected_len(other) <= begin
            )  # else the tree had it, and this request could not use it
            is_same = is_behind and other is not req and other.extra_key == req.extra_key
            if is_same and theirs[begin:end] == missing and theirs[:begin] == tokens[:begin]:
                if is_exact_request(req) and not self._becomes_exact(req, other):
                    continue
                self.counts["waits_for_a_duplicate"] += 1
                return True
        return False

    def _becomes_exact(self, req: QueuedRequest, other: QueuedRequest) -> bool:
        """True if what ``other`` computes is exact and can take the place of what is lossy on the path of ``req``."""
        lossy = first_lossy(self.tree.known_of(req))
        return not computes_lossy(other) and (lossy is None or lossy.lock_ref == 0)

    def lacks_room(self, adder: HookedAdder, req: QueuedRequest) -> bool:
        """True if what is to be loaded for a request, or computed of it in this batch, has no room on the GPU now, but
        will: others run, or copies of what is to leave are on their way. Or if what was to be loaded is not ready
        any more."""
        if not self.has_host:
            return False
        last = req.best_match_node if req.host_hit_length else req.last_node
        absent = [node for node in path_to(last) if node.value is None]
        copies = [node.kv.copies[Tier.HOST] for node in absent if Tier.HOST in node.kv.copies]
        if len(copies) < len(absent):  # since it was matched it had to make room for what else is read: match it anew
            return True
        num_new = len(req.full_untruncated_fill_ids) - REQUEST_KV.prefix_len(req) - req.host_hit_length
        if adder.rem_chunk_tokens is not None:
            num_new = min(num_new, max(0, adder.rem_chunk_tokens))
        needed = sum(copy.num_slots for copy in copies) + num_new + self.page_size
        if self.is_out_of_room:  # for one before it, which comes first
            return self.available_size() < needed
        self.tree.inc_lock_ref(last)
        has_room = self.has_room(needed)
        self.tree.dec_lock_ref(last)
        prefetch = self.prefetches.by_request.get(id(req))
        is_patient = prefetch is None or prefetch.turn_s is None or self.now_s() < prefetch.turn_s + DEFER_S
        if has_room or not is_patient:
            return False
        scheduler = self.tree.scheduler
        is_running = scheduler is not None and not scheduler.running_batch.is_empty()
        if not is_running and not self.is_freeing_host():
            return False
        self.is_out_of_room = True
        self.counts["loads_deferred"] += 1
        return True
