"""What an outbox does where its client does not read, or what is there must not be sent yet."""

from __future__ import annotations

import asyncio

import pytest

from radixrt.frontend.http.outbox import MAX_BACKLOG, Disconnected, Outbox

LARGE = b"x" * (MAX_BACKLOG + 1)


def test_what_nobody_could_read_yet_is_no_backlog():
    """Be it one large chunk, many in a turn, or one that comes while another is sent."""

    async def main() -> None:
        outbox = Outbox()
        for _ in range(2):
            outbox.put(LARGE)
        assert len(await outbox.part()) == 2 * len(LARGE)
        outbox.put(LARGE)
        assert await outbox.part() == LARGE and outbox.failure is None

    asyncio.run(main())


@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_does_not_read_gets_nothing_with_a_gap(ended):
    """Nor is its answer complete, also where the end is what was too much."""

    async def main() -> None:
        outbox = Outbox()
        outbox.put(b"first")
        assert await outbox.part() == b"first"
        for chunk in (b"second", LARGE):
            assert outbox.failure is None
            outbox.put(chunk)
        outbox.put(b"behind the gap")
        outbox.finished = ended
        with pytest.raises(Disconnected):
            await outbox.part()

    asyncio.run(main())


def test_the_last_part_of_a_stream_is_held_until_it_is_settled():
    async def run() -> None:
        settled, outbox = asyncio.Event(), Outbox()
        outbox.settled = settled.wait
        outbox.put(b"first")
        assert await outbox.part() == b"first"
        outbox.put(b"last")
        outbox.finished = True
        last = asyncio.create_task(outbox.part())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not last.done()
        settled.set()
        assert await last == b"last" and await outbox.part() is None

    asyncio.run(run())
