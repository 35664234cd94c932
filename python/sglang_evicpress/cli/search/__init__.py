"""The command ``evicpress search``."""
