"""Recomputation: what can be computed again instead of moved, as a rewriting of the trace.

A *drop* gives up a variable's chunks after a function, without a copy. Directly before the next function that uses it,
the functions that made its bytes run again. A program that does this records a sequence with those functions in it, so
the rewritten trace is an ordinary one: the variable ends where it is dropped, and another one with the same bytes is
born where they are made again. Policies, the simulator and the bound of swapping take it as any other trace.

    operators.py   which functions may run again, and why
    history.py     which bytes a function reads, whether they still exist, and what makes them again
    candidates.py  every drop that a trace allows
    rewriting.py   the trace of a program that drops, in which something may linger beyond its end
    choice.py      which drops make a step fastest, with the simulator as judge
    published.py   what others choose, to begin with and to compare with
    bound.py       a step time that no plan of swapping and recomputing beats
    schedule.py    what a program is to drop, and who carries that out
    account.py     which schedules a run follows, and whether that is faster as measured
"""
