"""Steps past the bound of swapping alone: recomputation chosen together with swapping, on an emulated device."""
