from typing_extensions import Buffer

def scan(
    message: Buffer, values: int, numbers: int, entries: int, depth: int, /
) -> tuple[int, int | None, bytes, bytes, bytes, bytes]: ...
