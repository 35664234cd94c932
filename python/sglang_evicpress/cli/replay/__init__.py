"""`evicpress replay`."""
