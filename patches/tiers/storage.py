"""Storage below the GPU: host memory, an SSD folder, and the threads that copy to and from them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.agreement import Agreement, Health
from sglang_evicpress.patches.tiers.arrival import Arrival
from sglang_evicpress.patches.tiers.hicache_values import open_values
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.external.store import ExternalStore
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.host.arena import STEP_BYTES
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.shared_jobs import SharedWorkers
from sglang_evicpress.tiers.ssd.read_timer import ReadTimer
from sglang_evicpress.tiers.ssd.shared_tier import SharedSsdTier
from sglang_evicpress.tiers.ssd.tier import SsdTier

FAULTS_FLAG = "SGLANG_EVICPRESS_FAULTS"  # what the tiers do wrong on purpose, in tests: see tiers/faults.py
THREADS = {"load": 1, "check": 1, "read": 2, "copy": 1, "write": 1}
EXTERNAL_THREADS = {"lookup": 1, "external": 2, "publish": 1}


class Storage:
    """``counts`` and ``errors`` are those of ``/evicpress/tiers``. ``arrival`` is set when a thread has ended a job."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = Ranks(None) if ranks is None else ranks
        self.now_s: Callable[[], float] = time.monotonic
        self.agreement: Agreement | None = None
        self.ssd: SsdTier | None = None
        self.ssd_key: Key | None = None
        self.external: ExternalStore | None = None
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.arrival, self.read_timer = Arrival(), ReadTimer()
        self.workers: dict[str, Workers] = {}
        self._host: HostTier | None = None
        self._copier: PayloadCopier | None = None

    @classmethod
    def open(
        cls,
        config: EvicPressConfig,
        make_copier: Callable[[], PayloadCopier],
        identity: bytes,
        ranks: Ranks,
        *,
        is_cuda: bool,
    ) -> Storage:
        """Take the memory and start the threads. Raises ValueError or RuntimeError, one sentence, if it cannot be."""
        storage = cls(ranks)
        if not config.has_tiers:
            return storage
        storage._copier = make_copier()
        text = os.environ.get(FAULTS_FLAG)
        faults = None if text is None else Faults.parse(text, ranks.rank)
        # Ranks would have other memory at the same time if it was taken in steps.
        step_bytes = STEP_BYTES if ranks.is_alone else config.host_bytes
        storage._host = HostTier(config.host_bytes, is_pinned=is_cuda, faults=faults, step_bytes=step_bytes)
        storage.ssd_key = None if config.stores.key_file is None else Key.read(config.stores.key_file)
        if ranks.is_alone:
            storage.workers |= {name: Workers(name, number, storage.arrival) for name, number in THREADS.items()}
        else:
            shared = {name: SharedWorkers(name, number, storage.arrival) for name, number in THREADS.items()}
            storage.workers |= shared
            storage.agreement = Agreement(ranks, shared)
            storage.now_s = storage.agreement.now_s
        if config.ssd_dir is not None:
            per_day = None if config.ssd_write_gb_per_day is None else config.ssd_write_gb_per_day * GB
            opener = SsdTier if ranks.is_alone else SharedSsdTier
            ssd = opener.open(
                *(config.ssd_dir, config.ssd_bytes, per_day, config.ssd_fsync, identity, faults, ranks.rank),
                key=storage.ssd_key,
            )
            storage.use_ssd(ssd)
        backend, extra_config = config.stores.backend, config.stores.config or {}
        if backend is not None:
            storage.external = ExternalStore.open(lambda: open_values(backend, extra_config), storage.ssd_key)
            for name, number in EXTERNAL_THREADS.items():
                storage.workers[name] = Workers(name, number, storage.arrival)
        return storage

    @property
    def has_host(self) -> bool:
        return self._host is not None

    @property
    def host(self) -> HostTier:
        """Raises RuntimeError where there is none."""
        if self._host is None:
            raise RuntimeError("evicpress: there is no host tier")
        return self._host

    @property
    def copier(self) -> PayloadCopier:
        """Raises RuntimeError where nothing is copied."""
        if self._copier is None:
            raise RuntimeError("evicpress: there is no tier below the GPU to copy to")
        return self._copier

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers in use, the GPU first."""
        found = [Tier.GPU]
        if self.has_host:
            found.append(Tier.HOST)
        if self.ssd is not None:
            found.append(Tier.SSD)
        return tuple(found)

    @property
    def num_pending_jobs(self) -> int:
        """Number of jobs under way, without those of an external store that hangs: nobody waits for them."""
        hangs = self.external is not None and self.external.circuit.hangs
        names = self.workers.keys() - EXTERNAL_THREADS.keys() if hangs else self.workers.keys()
        return sum(self.workers[name].num_pending for name in names)

    @property
    def is_external_away(self) -> bool:
        """True while there is an external store, and nothing is read from it."""
        return self.external is not None and not self.external.may_read

    def use_ssd(self, ssd: SsdTier | None) -> None:
        """The SSD tier is this one from now on; whoever calls sees to the nodes."""
        self.ssd = ssd
        agreement = self.agreement
        if agreement is not None and isinstance(ssd, SharedSsdTier):
            store = ssd.store
            agreement.local_health = lambda: Health(store.is_writable, store.is_answering)
            (has_former,) = self.ranks.any_of([store.num_entries > 0])
            ssd.share(self.now_s, lambda: agreement.health, has_former=has_former)

    def submit(self, name: str, job: Job) -> None:
        """Hand a job to the threads of that name."""
        self.workers[name].submit(job)

    def hand_over(self, name: str, job: Job) -> None:
        """A job that is done: finish it, or, where it has to be done on other ranks too, when it is."""
        workers = self.workers[name]
        if isinstance(workers, SharedWorkers):
            workers.hand_over(job)
        else:
            job.is_finished = True
            job.finish()

    def finished_jobs(self) -> list[Job]:
        """The jobs whose ``finish`` is due."""
        if self.agreement is not None:
            return self.agreement.finished()
        return [job for workers in self.workers.values() for job in workers.finished()]

    def meet(self) -> None:
        """Let ranks that all wait learn what has happened."""
        if self.agreement is not None:
            self.agreement.meet()
