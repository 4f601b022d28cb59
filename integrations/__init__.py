"""Adapters between frameworks and the allocator: PyTorch, NumPy; CuPy, Numba and cuda.core."""
