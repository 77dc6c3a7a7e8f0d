"""The fused engine in Triton. Nothing is imported here: a CPU install has no Triton.

On the host, `engine` sizes and runs a call, `tunings` says what is fast for which batch, `stages` in which order its
stages run, and `launching` launches them. `plans` and `forms` turn a strategy and its inputs into a `call.Call`, which
is what a kernel is compiled for; `memory` finds the workspace, and `layout` divides it. `rules` and `ops` turn rules
into Triton functions.

On the device, `kernel` is the entry. Its stages are in `reduce` (reduce and sum), `select` (select and finish, with
`lists`, `search` and `min_p`), `bins` (collect), `decide` (with `masses`) and `emit` (with `partials`, `draw`, `held`,
`listed` and `results`). They share `rows`, `laws`, `positions`, `pairs`, `elements`, `scalars`, `records`, `keys`,
`sums`, `counters` and `random`. To read them: `kernel`, `rows`, `laws`, `positions`, `decide`, `emit`.
"""
