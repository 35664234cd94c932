"""The page at ``/evicpress/``: one file, without anything from the network."""
