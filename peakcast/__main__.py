"""`python -m peakcast` is the `peakcast` command."""

from peakcast.commands.cli import main

main()
