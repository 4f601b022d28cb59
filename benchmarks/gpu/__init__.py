"""The same models out-of-core by us and by others, on one CUDA GPU in ten minutes: `python -m benchmarks.gpu`."""
