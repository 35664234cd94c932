"""Quality of contexts: insights, held-out questions, scorers, cost, durability: `make show-profiler`."""
