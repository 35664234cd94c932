"""Budgets of running requests: `make show-decode`."""
