"""The `holdfast` command before there is holdfast: importing torch takes a second or two, and Ctrl-C ends that at once.

Beside the package and not in it, for whatever is in it imports torch first; and an import that is interrupted by an
exception may show it in the middle of torch's own lines, or swallow it and go on.
"""

import signal
import threading


def main() -> None:
    """The entry point of the command."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT)
    if mine is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from holdfast.cli import main as command

    if mine is signal.default_int_handler:
        signal.signal(signal.SIGINT, mine)
    command()
