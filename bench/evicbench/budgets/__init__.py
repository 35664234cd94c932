"""Budgets per layer and per head on the small trained model: searched, and compared on questions never searched on."""
