"""Commands that look at a running server."""
