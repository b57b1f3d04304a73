"""The console script and `python -m quantkit`. Interrupts are handled before anything is imported."""

import os
import signal


def main() -> None:
    """Run the command line. An interrupt during imports ends the process without a traceback."""
    # Shells make background jobs ignore SIGINT.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _end)
    from quantkit import cli

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    except KeyboardInterrupt:  # between a command's end and this one
        _end()
    finally:
        if interruptible:  # ignore Ctrl-C during shutdown
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(*_: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
