"""The host memory tier."""
