"""Search for what a form should keep where: layer budgets."""
