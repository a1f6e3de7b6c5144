"""`python -m holdfast` is the holdfast command."""

from .cli import main

main()
