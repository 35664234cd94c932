"""What the scheduler knows about answer quality of compressed contexts."""
