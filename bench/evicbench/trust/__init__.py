"""Promises to others who rely on the cache: routers that read its events, and owners of damaged files."""
