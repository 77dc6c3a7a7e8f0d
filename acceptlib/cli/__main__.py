"""`python -m acceptlib.cli`, where the script is not on the path."""

from __future__ import annotations

from acceptlib.cli.app import main

main()
