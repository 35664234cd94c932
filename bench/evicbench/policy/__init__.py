"""Plans beside the optimum, their speed, and replays beside rivals: `make show-policy`."""
