"""`python -m radixrt` is the command `radixrt`."""

from radixrt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
