"""`python -m acceptlib`: the command line."""

from acceptlib.cli import main

main()
