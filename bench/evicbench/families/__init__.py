"""Model families: a tiny random model of each on a real server, its answers against transformers."""
