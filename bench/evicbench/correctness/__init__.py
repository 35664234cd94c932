"""Answers beside a reference, storms, unloaded overhead, stock SGLang: `make show-foundation`."""
