"""Host memory and SSD: bandwidth, fragmentation, kills, chaos, restarts: `make show-tiers`."""
