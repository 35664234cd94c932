"""`evicpress profile`."""
