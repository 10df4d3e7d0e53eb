"""Arrays are written in an event loop of Orbax, which closes it at the first error."""

import asyncio
import gc

import pytest

from jaxpar.training.checkpoint import _close_last


@pytest.mark.parametrize("turns", range(6))
def test_a_second_write_that_fails_at_any_time_prints_nothing(turns, caplog):
    async def fail(turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        raise OSError("no space")

    async def write():
        await _close_last()
        await asyncio.gather(fail(0), fail(turns))

    loop = asyncio.new_event_loop()
    with pytest.raises(OSError, match="no space"):
        loop.run_until_complete(write())
    loop.close()
    gc.collect()
    assert not caplog.messages
