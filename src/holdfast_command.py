"""The `holdfast` command before there is holdfast: importing torch takes a second or two, and Ctrl-C ends that at once.

Beside the package and not in it, for whatever is in it imports torch first; and an import that is interrupted by an
exception may show it in the middle of torch's own lines, or swallow it and go on. The package imports this first of
all, for `python -m holdfast` imports the package before anything else.
"""

import signal
import sys


def main() -> None:
    """The entry point of the command."""
    _end_at_once()
    from holdfast.cli import main as command

    if _listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _end_at_once() -> None:
    """From here on Ctrl-C ends the process, unless it is ignored, as in a shell's background."""
    global _listening
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _listening = True


_listening = False
_words = sys.orig_argv
if sys.argv[:1] == ["-m"] and "-m" in _words and _words[_words.index("-m") + 1] == "holdfast":
    _end_at_once()
