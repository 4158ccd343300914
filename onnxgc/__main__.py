"""`python -m onnxgc`."""

from onnxgc.cli.main import main

if __name__ == "__main__":
    main()
