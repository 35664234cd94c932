"""Where KV is kept below the GPU: what an entry is (identity, entry), and the stores that hold entries."""
