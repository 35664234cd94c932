"""A cache that can be asked and told everything, for the tests of questions and of the routes they come by."""

from __future__ import annotations

import numpy as np

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.introspect.operations import Json, NodeBusy, UnknownNode


class FakeCache:
    """Three nodes: 1 can be compressed, 2 is locked, 3 is too short."""

    def __init__(self) -> None:
        self.forms = {1: "exact", 2: "exact", 3: "exact"}
        self.broken: list[str] = []
        self.flushed: list[Tier] = []
        self.ssd: tuple[str, float, float | None] | None = None

    def _known(self, node_id: int) -> int:
        if node_id not in self.forms:
            raise UnknownNode(node_id)
        return node_id

    def describe_tree(self, after: int = 0, limit: int = 100) -> Json:
        return {"nodes": [{"id": node_id, "form": form} for node_id, form in self.forms.items()]}

    def describe_outline(self, after: int = 0, limit: int = 500) -> Json:
        page = [node_id for node_id in self.forms if node_id > after][:limit]
        following = page[-1] if page and page[-1] != max(self.forms) else None
        return {"columns": ["id", "form"], "nodes": [[one, self.forms[one]] for one in page], "next": following}

    def describe_node(
        self, node_id: int, *, positions: bool = False, tokens: bool = False, layer: int | None = None
    ) -> Json:
        node: Json = {"id": np.int64(self._known(node_id)), "form": self.forms[node_id]}
        if positions:
            node["positions"] = np.arange(3, dtype=np.int32)
        if tokens:
            node["tokens"] = [7, 8, 9]
        return node

    def describe_stats(self) -> Json:
        raise RuntimeError("the pool is on fire")

    def describe_news(self, since: int, limit: int, *, figures: bool = False, requests: int | None = None) -> Json:
        return {"decisions": self.read_journal(since, limit), "figures": figures, "requests": requests}

    def explain_node(self, node_id: int) -> Json:
        return {"id": self._known(node_id), "options": []}

    def read_journal(self, since: int, limit: int) -> Json:
        return {"since": since, "limit": limit}

    def compress_node(self, node_id: int, form: Form, hold_s: float) -> Json:
        if self._known(node_id) == 2:
            raise NodeBusy(node_id)
        if node_id == 3:
            raise ValueError(f"node 3 cannot be brought to {form}: its 3 tokens are under the 64 needed")
        self.forms[node_id] = str(form)
        return {"id": node_id, "form": str(form), "freed_slots": 5, "hold_s": hold_s}

    def check_integrity(self) -> Json:
        return {"ok": not self.broken, "violations": self.broken}

    def evict_slots(self, num_slots: int) -> Json:
        return {"freed_slots": num_slots}

    def describe_tiers(self) -> Json:
        return {"tiers": [tier.label for tier in (Tier.GPU, Tier.HOST)]}

    def flush_tier(self, tier: Tier) -> Json:
        if tier is Tier.SSD and self.ssd is None:
            raise ValueError("there is no SSD tier: attach one first")
        self.flushed.append(tier)
        return {"tier": tier.label}

    def demote_node(self, node_id: int, tier: Tier, hold_s: float, *, codec: str | None = None) -> Json:
        if self._known(node_id) == 2:
            raise NodeBusy(node_id, change="demoted")
        if node_id == 3:
            raise ValueError("node 3 cannot be demoted to host: the host tier is full")
        return {"id": node_id, "tier": tier.label, "hold_s": hold_s} | ({} if codec is None else {"codec": codec})

    def attach_ssd(self, folder: str, gb: float, write_gb_per_day: float | None) -> Json:
        if self.ssd is not None:
            raise ValueError(f"the SSD tier is at {self.ssd[0]!r}: detach it first")
        self.ssd = (folder, gb, write_gb_per_day)
        return {"dir": folder}

    def detach_ssd(self) -> Json:
        if self.ssd is None:
            raise ValueError("there is no SSD tier to detach")
        self.ssd = None
        return {"dir": None}

    def describe_requests(
        self, rid: str | None, *, positions: bool = False, offset: int = 0, after: int = 0, limit: int = 100
    ) -> Json:
        return {"rid": rid, "positions": positions, "offset": offset, "after": after, "limit": limit}
