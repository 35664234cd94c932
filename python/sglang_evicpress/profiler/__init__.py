"""Measures how answers stay when a context is compressed, and keeps what was measured (EvicPress section 4.3)."""
