"""Entries of KV below the GPU: bytes, headers, identity."""
