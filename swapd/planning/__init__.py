"""What a plan has to solve, what it is, whether it is right, and what no plan beats."""
