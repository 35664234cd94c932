"""Gate at which attention waits for a layer that is being loaded: only for the loads that its batch uses.

A batch uses a load if a node that the load fills is on the path of one of its requests, whoever the load was begun for.
That is settled when the batch is launched. It is enough under the overlap scheduler too, for three reasons. All asks of
a batch are made while it is launched, by the thread that also begins loads, so that what round n+1 begins while the
device still computes batch n comes after them. Batch n does not need it: what is loaded was not on the GPU when batch n
was made; and where slots that a finished request of batch n still writes to are given to a load, its copies start
behind that pass. Batch n+1 asks for whatever of it is not over by then, also for what an earlier batch has waited for.
A request that takes over nodes which are loaded for another one, as its own prefill ends, has them on its path from
then on; the decode batch that it is in next may be a graph, which asks for nothing, so that it waits before its launch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_evicpress.patches.tiers.load import Load


class LayerGate:
    """Gate that SGLang's pool asks before attention reads the keys, and again the values, of a layer.

    ``loads`` are those that are not over, a list that the cache keeps. Outside ``launch`` all of them are waited for.
    ``stalled_s``: seconds that the batch launched last has waited for loads; infinite on a device that does so itself.
    """

    def __init__(self, loads: Sequence[Load], *, is_cuda: bool) -> None:
        self._loads = loads
        self._is_cuda = is_cuda
        self._used: Sequence[Load] | None = None
        self._layer = -1
        self.stalled_s = 0.0

    @contextmanager
    def launch(self, used: Sequence[Load], *, asks: bool) -> Iterator[None]:
        """While a batch is launched that uses these loads. One that is replayed from a graph ``asks`` for no layer, and
        waits for all of them here."""
        self.stalled_s, self._layer = 0.0, -1
        if self._is_cuda and not all(load.has_ended() for load in used):
            self.stalled_s = math.inf
        if not asks:
            begin = time.perf_counter()
            for load in used:
                load.join()
            self.stalled_s += time.perf_counter() - begin
        self._used = used
        try:
            yield
        finally:
            self._used = None

    def wait_until(self, layer: int) -> None:
        """Return when the layer is there, or ordered before what this thread's device stream does next."""
        used = self._loads if self._used is None else self._used
        if not used or (self._used is not None and layer == self._layer):
            return
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph is made anew from a made-up batch, and must hold no wait for what is loaded now
        begin = time.perf_counter()
        for load in used:
            load.wait_for(layer)
        self.stalled_s += time.perf_counter() - begin
        self._layer = layer

    def set_consumer(self, index: int) -> None:
        """SGLang tells which of its own loads a batch waits for; ours are found by the batch."""
