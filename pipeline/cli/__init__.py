"""The program `headrace`: one module per command."""

from typing import Final

OPERATOR_EXIT: Final = 2
"""Exit status of a set-up that cannot work, as of a wrong command line: starting the same again does not help."""
