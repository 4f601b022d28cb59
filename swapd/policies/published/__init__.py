"""Policies of others, to compare with: LMS, vDNN, nnabla, and the schedule window without virtual addresses."""
