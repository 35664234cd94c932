"""Structure of the product: sizes, types, names, prose, parts: `make show-house`."""
