"""Functions larger than the budget: into how many parts each is divided, and how (docs/splitting.md has the sources).

For convolutions in micro-batches read `configurations` first, then `micro_batches` and `division`; for layers in parts
`segments`. `store` keeps what was measured.
"""
