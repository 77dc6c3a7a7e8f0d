"""Rules in Triton.

Nothing is imported here: a CPU install has no Triton. `ops` is the rule vocabulary, `binding` turns a rule into a
Triton function and calls it inside kernels.
"""
