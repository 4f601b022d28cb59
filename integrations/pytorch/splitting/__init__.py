"""Functions larger than the budget, in parts: what the adapter does when an operator does not fit.

    registry.py     which operator is split by what; defines `ooc_split::...` operators, which the adapter calls
    context.py      what a handler may ask: how large a part may be, large results, which division is exact
    geometry.py     views, the memory that they touch, and how they are cut
    verification.py random arguments, bits compared, differences
    tally.py        what was split, for the summary
    runtime.py      one session's: budget, mode, store
    copies.py factories.py pointwise.py random.py lists.py   the operators that are cut wherever one likes

A handler is a function `f(context, *arguments, **keywords)` with the operator's own arguments, registered by
`@registry.handler("aten::name")`. It runs below autograd, in range mode: the operators that it calls are functions of
their own, and a view is only the part of its variable that it reaches. It works on plain tensors too, without a core.
"""
