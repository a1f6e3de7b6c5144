"""The command line: holdfast demo | bench | report | diagnose | inspect | merge | forecast."""

import sys

from . import bench, demo, diagnosis, memories
from .console import app

__all__ = ["app", "bench", "demo", "diagnosis", "main", "memories"]


def main() -> None:
    """The entry point of the `holdfast` command."""
    try:
        app()
    except KeyboardInterrupt:  # before a command has begun: those that can be stopped say so themselves
        print("Stopped.")
        sys.exit(130)
