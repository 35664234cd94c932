"""Plugin that SGLang loads beside ours: a cache that loads whatever is held below the GPU, and waits for it. A small
model, or a busy machine, computes much of it sooner, and then a check of what was loaded has nothing to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evicbench.plugins import path_with, plugin_folder

WAIT_S = 30.0


def load() -> None:
    """SGLang calls this in each of its processes."""
    from sglang_evicpress.patches.tiers import load_terms

    vars(load_terms).update(num_worth_loading=lambda pieces, *_, **__: len(pieces), deadline_s=lambda *_: WAIT_S)


@contextmanager
def always_loading() -> Iterator[dict[str, str]]:
    """Environment of such a server."""
    with plugin_folder("evicpress_always_load", f"{__name__}:load") as folder:
        yield {"PYTHONPATH": path_with(folder)}
