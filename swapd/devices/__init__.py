"""What is known of a device: what was measured, what was looked up, and whether the device can be used."""
