"""Presses of forms, with what they need beyond the KV: the window of queries, the geometry of the model's queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang_evicpress.core import Form
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.patches.tree.node_kv import NodeSlots
from sglang_evicpress.press import Press, get_press
from sglang_evicpress.press.geometry import GeometryPress
from sglang_evicpress.press.random import Random
from sglang_evicpress.press.snapkv import SnapKV


class FormPresses:
    """``geometry`` is on the device of the pool; None where the server was given none."""

    def __init__(self, window: int, geometry: QueryGeometry | None, device: torch.device) -> None:
        self.geometry = None if geometry is None else geometry.to(device)
        self._host_geometry = geometry  # for KV that is not in the pool
        self._window, self._device = window, device

    def of(self, form: Form, layers: Sequence[int] | None = None, device: torch.device | None = None) -> Press:
        """The press of a form for some layers (None: all), whose KV is on ``device`` (None: in the pool)."""
        press = get_press(form.press or "")
        if isinstance(press, GeometryPress):
            geometry = self.geometry if device in (None, self._device) else self._host_geometry
            if geometry is not None and layers is not None:
                geometry = geometry.of_layers(layers)
            return replace(press, geometry=geometry)
        if isinstance(press, Random) and layers is not None:
            return replace(press, layers=tuple(layers))
        return replace(press, window=self._window) if isinstance(press, SnapKV) else press

    def sighted(self, form: Form, node: NodeSlots, layers: Sequence[int] | None = None) -> Press:
        """The same, or another one where it lacks what it looks at: every press gives an order."""
        press = self.of(form, layers)
        is_blind = isinstance(press, GeometryPress) and press.geometry is None  # of a server that had one
        has_no_queries = press.needs_queries and node.window is None  # they had to make room
        return get_press("keydiff") if is_blind or has_no_queries else press
