"""Planning in simulation: what each policy makes of recorded traces. Nothing here runs on a device."""
