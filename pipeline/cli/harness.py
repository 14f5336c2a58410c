"""Commands that measure or trouble a fleet of their own find its harness beside the packages: tests are not installed."""

import sys
from typing import Final

from pipeline.errors import OperatorError
from pipeline.paths import CONFIGS

CHECKOUT: Final = CONFIGS.parent


def find_harness(package: str) -> None:
    """Make `tests.<package>` importable. Raises `OperatorError` where it does not lie here."""
    if not (CHECKOUT / "tests" / package).is_dir():
        raise OperatorError(
            f"There is no tests/{package} in {CHECKOUT}.", "Install headrace from a checkout: pip install -e ."
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
