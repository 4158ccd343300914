"""`python -m onnxgc`, and the `onnxgc` command: errors while its modules are imported are one line too."""

import gc
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Import and run the command line."""
    # Graphs have few cycles: rare collections take a tenth of the time.
    gc.set_threshold(200_000, 50, 1000)
    try:
        from onnxgc.cli.main import main as run
    except KeyboardInterrupt:
        os.write(2, b"onnxgc: interrupted\n")
        os._exit(_INTERRUPTED)
    except (ImportError, MemoryError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.exit(f"onnxgc: the program cannot be loaded: {reason}; check its installation and limits")
    try:
        run()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            # Python would end with the signal if it arrived within `exec` of a text.
            os._exit(_INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
