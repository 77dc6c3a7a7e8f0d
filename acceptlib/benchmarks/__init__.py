"""Verification timed: workloads as data, a gate before the clock, other libraries and the read floor beside it."""
