"""The command line: holdfast demo | bench | report | diagnose | inspect | merge | forecast."""

from . import bench, demo, diagnosis, memories
from .console import app

__all__ = ["app", "bench", "demo", "diagnosis", "main", "memories"]


def main() -> None:
    """The entry point of the `holdfast` command."""
    app()
