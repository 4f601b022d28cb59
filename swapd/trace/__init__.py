"""What one iteration of a program did to memory: recorded, kept in a file, taken apart into ranges."""
