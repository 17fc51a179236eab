"""Model families, one file each, named as the checkpoint's `model_type`; a file that is here is served.

Its function `spec(config)` turns the parsed config.json into a ModelSpec. Where a family needs more than its fields can
say, the file has a subclass of `WeightLoader` (`ModelSpec.loader`), and what that makes of a layer: an MLP, attention,
or a whole layer of its own, and tensors by other names, or other than they are stored. `tests/worker/families.py` says
how small checkpoints of it are made, with which the tests of all families compare it with transformers.

DEFAULTS are those of transformers for fields that config.json lacks. SERVED are the only values of these fields that
are served: those of the published models.
"""
