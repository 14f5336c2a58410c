"""`python -m tests.simulation`: what `headrace simulate` does."""

import typer

from pipeline.cli.simulate import simulate

if __name__ == "__main__":
    typer.run(simulate)
