"""Layer budgets, and heads that share slots, on the small trained model: searched, and compared on other questions."""
