"""Functions larger than the budget: into how many parts each is divided, and how.

The arithmetic is in pure functions; docs/splitting.md has its sources.

- `configurations`: the vocabulary. `reuse`, `pareto`, `division`: micro-batches (micro-cuDNN, Oyama et al. 2018)
- `segments`: layers in parts (mmCNN, Li et al. 2019)
"""
