"""EvicPress for SGLang: compressed shared prefixes, chosen by measured utility. Importing it does nothing."""

from __future__ import annotations

__version__ = "0.1.0"
