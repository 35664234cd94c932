"""Parts of the demo: `load` asks the questions, `report` sums up and prints. `bench/demo.py` runs them."""
