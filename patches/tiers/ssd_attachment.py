"""The SSD tier under a running server: it is attached, detached, and parted from when the model is another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.tiers.types import Copies, Names, Removals, Rounds, Tiers
from sglang_evicpress.patches.tree.types import Allocator, Node
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.folder import NotAllowedError, StoreError, allowed_roots
from sglang_evicpress.tiers.ssd.tier import SsdTier

logger = logging.getLogger(__name__)

SETTLE_S = 0.5  # what writes on their way have to end before the folder is let go


@dataclass(eq=False, repr=False)
class SsdAttachment:
    """Attaches and detaches. ``is_mixed``: the tree holds KV of several models. ``key`` seals entries.
    ``rebuild_policy``: choose from the tiers that there are now."""

    nodes: Mapping[int, Node]
    allocator: Allocator
    storage: Tiers
    names: Names
    placement: Copies
    removal: Removals
    rounds: Rounds
    config: EvicPressConfig
    key: Key | None
    rebuild_policy: Callable[[], None]

    def __post_init__(self) -> None:
        self._identify: Callable[[], bytes] | None = None
        self._parted: SsdTier | None = None  # until the tree is flushed
        self.is_mixed = False

    def know_model(self, identify: Callable[[], bytes]) -> None:
        """``identify`` tells the identity of the model that computes from now on."""
        self._identify = identify

    def attach(self, folder: str, gb: float, write_gb_per_day: float | None) -> None:
        storage, config = self.storage, self.config
        if not storage.has_host:
            raise ValueError("the SSD tier goes through host RAM, and there is none: start with --kv-host-gb")
        if self.is_mixed:
            raise ValueError("the weights changed and the cache holds KV of the old ones: flush it first")
        self._check_alone()
        if storage.ssd is not None:
            raise ValueError(f"the SSD tier is {storage.ssd.folder} already: detach it first")
        roots = allowed_roots(config.ssd_dir, config.ssd_allow_dirs)
        per_day = None if write_gb_per_day is None else write_gb_per_day * GB
        terms = int(gb * GB), per_day, config.ssd_fsync, self.names.identity, storage.host.faults
        try:
            self._use(SsdTier.attach(folder, *terms, key=self.key, roots=roots))
        except NotAllowedError as error:
            raise IntrospectionError(403, str(error)) from None
        except (StoreError, OSError) as error:
            raise ValueError(str(error)) from None
        self.rebuild_policy()

    def detach(self) -> None:
        ssd = self.storage.ssd
        if ssd is None:
            raise ValueError("there is no SSD tier: expected one to be attached")
        self._check_alone()
        self._detach(ssd)

    def _check_alone(self) -> None:
        if not self.storage.ranks.is_alone:
            raise ValueError(
                "an SSD tier cannot be attached to, or detached from, a running server with --tp-size over 1, whose "
                "ranks would have to agree: start it with or without --kv-ssd-dir"
            )

    def _detach(self, ssd: SsdTier) -> None:
        storage = self.storage
        self.rounds.settle(lambda: storage.workers["write"].num_pending == 0, SETTLE_S)
        self._use(None)
        self.removal.forget_ssd()
        for entry in storage.host.entries():
            entry.ssd = None
        self.rebuild_policy()
        self.close(ssd)

    def model_changed(self) -> None:
        """The model may have other weights now, and the tree was kept: if it holds KV of both, nothing goes to the SSD,
        or comes from it, until the tree is flushed."""
        identity = self._identity_now()
        if identity == self.names.identity:
            return
        if not self.nodes and not self.is_mixed and self.allocator.available_size() == self.allocator.size:
            self._change_identity(identity)
            self.rebuild_policy()
            return
        self.is_mixed = True
        if self.storage.external is not None:
            self.storage.external.is_paused = True
        former = self.storage.ssd
        if former is not None:
            logger.warning("evicpress: the weights changed without a flush: the SSD tier is off until /flush_cache")
            self._detach(former)
            self._parted = former

    def flush(self, *, is_first: bool = False) -> None:
        """The tree goes, and with it every SSD entry, as the weights may be others now; not of one that is being made
        (``is_first``)."""
        if self.storage.ssd is not None and not is_first:
            self.storage.ssd.clear(self.storage.workers["write"])
        self.is_mixed = False
        if self.storage.external is not None:
            self.storage.external.is_paused = False
        identity = self._identity_now()
        if identity != self.names.identity or self._parted is not None:
            self._change_identity(identity)

    def close(self, ssd: SsdTier, seconds: float | None = None) -> None:
        """Let go of a folder; one that does not answer is counted, and waited for no longer."""
        if not ssd.close(seconds):
            self.storage.errors["ssd_close_deadline"] += 1

    def _identity_now(self) -> bytes:
        """Identity of the model that computes from now on; without tiers nobody needs one."""
        return self.names.identity if self._identify is None or not self.storage.has_host else self._identify()

    def _change_identity(self, identity: bytes) -> None:
        """What is on the SSD is none of the new model's business, and must not look like it."""
        self.names.use_identity(identity)
        present, parted = self.storage.ssd, self._parted
        self._parted = None
        former = present or parted
        if former is None:
            return
        if present is not None:
            self.close(present)
        opened: SsdTier | None = None
        try:
            opened = former.reopened(identity)
        except (StoreError, OSError) as error:
            logger.error("evicpress: the SSD tier is lost: %s", error)
        (is_lost,) = self.storage.ranks.any_of([opened is None])
        if is_lost and opened is not None:
            self.close(opened)
        self._use(None if is_lost else opened)

    def _use(self, ssd: SsdTier | None) -> None:
        """The SSD tier is this one from now on; whoever calls sees to the nodes."""
        self.storage.use_ssd(ssd)
        self.placement.use_no_ssd_entry()
