"""The demo: `load` asks the questions, `report` sums up and prints, `__main__` runs both servers."""
