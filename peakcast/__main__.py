"""`python -m peakcast` is the `peakcast` command."""

from peakcast.cli import main

main()
