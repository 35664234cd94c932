"""Geometry of queries before RoPE: where each head's queries lie, and the scores of keys that follow from that."""
