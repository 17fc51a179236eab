from typing import Self, final

from typing_extensions import Buffer

@final
class IntMatrix:
    def __new__(
        cls, values: Buffer, scales: Buffer, mins: Buffer | None, rows: int, columns: int, bits: int, group: int, /
    ) -> Self: ...
    def multiply(self, x: int, out: int, count: int, threads: int, add: bool, /) -> None: ...
    def dequantize(self, out: int, first: int, count: int, threads: int, /) -> None: ...
    def take(self, out: int, ids: int, count: int, /) -> None: ...

def attend(
    q: int, k: int, v: int, out: int, slots: int, bounds: int, requests: int, heads: int, kv_heads: int, dim: int,
    scale: float, threads: int, /,
) -> None: ...  # fmt: skip
