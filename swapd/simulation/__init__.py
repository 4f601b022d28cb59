"""What a plan takes on a machine that is simulated."""
