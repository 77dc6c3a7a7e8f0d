"""Engines that run any strategy: reductions, stopping and the draw; a strategy brings only its rules."""
