"""Storage below the GPU: host memory, an SSD folder, and the threads that copy to and from them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import Tier
from sglang_evicpress.patches.tiers.arrival import Arrival
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.entry.payload import PayloadCopier
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.host.tier import HostTier
from sglang_evicpress.tiers.jobs import Job, Workers
from sglang_evicpress.tiers.ssd.read_timer import ReadTimer
from sglang_evicpress.tiers.ssd.tier import SsdTier

FAULTS_FLAG = "SGLANG_EVICPRESS_FAULTS"  # what the tiers do wrong on purpose, in tests: see tiers/faults.py
THREADS = {"load": 1, "check": 1, "read": 2, "copy": 1, "write": 1}


class Storage:
    """``counts`` and ``errors`` are those of ``/evicpress/tiers``. ``arrival`` is set when a thread has ended a job."""

    def __init__(self) -> None:
        self.ssd: SsdTier | None = None
        self.ssd_key: Key | None = None
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.arrival, self.read_timer = Arrival(), ReadTimer()
        self.workers: dict[str, Workers] = {}
        self._host: HostTier | None = None
        self._copier: PayloadCopier | None = None

    @classmethod
    def open(
        cls, config: EvicPressConfig, make_copier: Callable[[], PayloadCopier], identity: bytes, *, is_cuda: bool
    ) -> Storage:
        """Take the memory and start the threads. Raises ValueError or RuntimeError, one sentence, if it cannot be."""
        storage = cls()
        if not config.has_tiers:
            return storage
        storage._copier = make_copier()
        text = os.environ.get(FAULTS_FLAG)
        faults = None if text is None else Faults.parse(text)
        storage._host = HostTier(config.host_bytes, is_pinned=is_cuda, faults=faults)
        storage.ssd_key = None if config.ssd_key_file is None else Key.read(config.ssd_key_file)
        for name, num_threads in THREADS.items():
            storage.workers[name] = Workers(name, num_threads, storage.arrival)
        if config.ssd_dir is not None:
            per_day = None if config.ssd_write_gb_per_day is None else config.ssd_write_gb_per_day * GB
            storage.ssd = SsdTier.open(
                config.ssd_dir, config.ssd_bytes, per_day, config.ssd_fsync, identity, faults, key=storage.ssd_key
            )
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
        return sum(workers.num_pending for workers in self.workers.values())

    def use_ssd(self, ssd: SsdTier | None) -> None:
        """The SSD tier is this one from now on; whoever calls sees to the nodes."""
        self.ssd = ssd

    def submit(self, name: str, job: Job) -> None:
        """Hand a job to the threads of that name."""
        self.workers[name].submit(job)
