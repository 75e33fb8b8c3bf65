"""Runs the command line as `python -m specrl.cli`, for installations whose scripts are not on the PATH."""

from specrl.cli import main

main()
