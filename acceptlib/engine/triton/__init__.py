"""Rules in Triton.

Nothing is imported here: a CPU install has no Triton. `ops` is the rule vocabulary, `source` makes a Triton function of
a rule, and `binding` hands it to kernels.
"""
