"""The fused engine in Triton.

Nothing is imported here: a CPU install has no Triton. On the host, `engine` launches stages, `forms` and `plans` say
what they are compiled for, and `source`, `binding` and `ops` make Triton functions of rules. On the device, `kernel` is
the entry, `reduce`, `select` (with `search`), `decide` and `emit` are its stages, and they share `layout`, `rows`,
`laws`, `sums` and `random`.
"""
