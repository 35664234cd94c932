"""Measurements that need a GPU, packed for a bare machine: `run.sh`."""
