"""What is not compared, and why. Nothing is left out of the run: every entry here ran without a fault.

An entry holds for samples on which two runs with plain memory disagree, and a test fails for an entry with none.
"""

UNDEFINED = {
    "empty": "returns memory as it was",
    "empty_like": "returns memory as it was",
    "empty_permuted": "returns memory as it was",
    "empty_strided": "returns memory as it was",
    "new_empty": "returns memory as it was",
    "new_empty_strided": "returns memory as it was",
    "linalg.lstsq": "hands LAPACK pivots that it did not initialise; a nonzero one changes the order of columns",
}

# Of samples that are large enough for several threads.
UNDEFINED_LARGE = {
    "take": "its gradient adds up in the order in which threads come",
    "_unsafe_masked_index": "its gradient adds up in the order in which threads come",
    "_unsafe_masked_index_put_accumulate": "adds up in the order in which threads come",
}
