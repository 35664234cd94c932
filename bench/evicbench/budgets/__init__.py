"""Layer budgets and budgets per head on the small trained model: searched, and compared on questions never searched on."""
