"""What is known of a device: measured, looked up, and whether it can be used."""
