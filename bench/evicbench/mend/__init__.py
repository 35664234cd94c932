"""Hostile clients, foreign SSD folders, refusals and threads: `make show-mend`."""
