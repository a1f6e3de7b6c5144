"""`python -m holdfast` is the holdfast command."""

from holdfast_command import main

main()
