"""`python -m pipeline.cli` is `headrace`."""

from pipeline.cli.main import main

main()
