"""The command line: holdfast demo | bench | report | inspect | merge | forecast."""

from . import bench, demo, memories
from .console import app

__all__ = ["app", "bench", "demo", "main", "memories"]


def main() -> None:
    """The entry point of the `holdfast` command."""
    app()
