"""`python -m radixrt.demo` takes the `tour`."""

from radixrt.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main("radixrt.demo.tour"))
