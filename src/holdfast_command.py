"""The `holdfast` command before there is holdfast: importing torch takes a second or two, and Ctrl-C ends that at once.

Beside the package and not in it, for whatever is in it imports torch first; and an import that is interrupted by an
exception may show it in the middle of torch's own lines, or swallow it and go on.
"""

import signal


def main() -> None:
    """The entry point of the command."""
    listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in a shell's background it is ignored
    if listening:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from holdfast.cli import main as command

    if listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
