"""Knowledge of the scheduler about the answer quality of compressed contexts."""
