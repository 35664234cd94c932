"""Codecs: sizes, speed and loss, and what they give a server and a simulated one: `make show-codecs`."""
