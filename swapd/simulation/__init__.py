"""How long a plan takes on a simulated machine, and what happens there."""
