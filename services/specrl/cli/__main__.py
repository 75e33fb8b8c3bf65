"""`python -m specrl.cli`, for an installation whose scripts are not on the PATH."""

from specrl.cli import main

main()
