"""A local model in place of a server: questions about contexts whose KV is kept uneven."""
