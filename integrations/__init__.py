"""Adapters between frameworks and the allocator: PyTorch, NumPy."""
