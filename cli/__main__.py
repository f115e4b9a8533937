"""Run the command line as ``python -m pltpack_cli``."""

from pltpack_cli.main import main

main()
