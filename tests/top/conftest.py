"""The broker and configuration of a command's tests."""

from tests.cli.conftest import broker, config

__all__ = ["broker", "config"]
