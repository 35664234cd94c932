"""Every system side by side on real servers: `make show-bench`."""
