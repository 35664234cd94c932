"""Storage of KV below the GPU: entries and their identity, and the stores that hold them."""
