"""What must hold where others rely on the cache: routers that read its events, files that were damaged, slots."""
