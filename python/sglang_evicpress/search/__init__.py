"""Search for what a form should keep where: budgets per layer."""
