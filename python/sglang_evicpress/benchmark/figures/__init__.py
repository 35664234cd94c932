"""Pictures and tables of one out folder; each module runs as `python -m`."""
