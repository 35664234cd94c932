"""Decode-time budgets: when a running request drops KV, how much, which, and how the rest is laid out again."""
