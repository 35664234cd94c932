"""Settings under load up to twice saturation: `make show-load`, `make bench-load`."""
