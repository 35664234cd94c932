"""The `evicpress` command."""
