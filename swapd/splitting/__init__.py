"""Functions larger than the budget: into how many parts each is divided, and how.

The arithmetic is in pure functions; docs/splitting.md has its sources.

- `configurations`: the vocabulary of micro-cuDNN (Oyama et al. 2018). `micro_batches`: one kernel. `division`: all
- `segments`: layers in parts (mmCNN, Li et al. 2019). `recorded`: the layers of a recorded iteration
- `store`: what was measured. `limits`: the errors
"""
