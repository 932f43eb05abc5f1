"""Requests that wait for a replica: clients take turns, as they do in an engine."""

import asyncio

import pytest

from arimage.app.engine.types import Cancelled, Limits, Refused, Request, Result
from arimage.app.server.replicas.replicas import Replicas


class Endless:
    """The answers of a replica that has accepted a request, which end when `finish` is called."""

    def __init__(self, request: Request):
        self.request, self.accepted, self._end = request, False, asyncio.get_running_loop().create_future()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.accepted:
            self.accepted = True
            return 16
        return await self._end

    def finish(self):
        self._end.set_result(Result([], [0], 1, 1, 1, True, "ar", None, {}))

    def cancel(self):
        """Nothing was generated."""


class Handle:
    """Records the requests that go to replicas, in their order."""

    def __init__(self):
        self.sent, self.generate = [], self

    def remote(self, request):
        self.sent.append(Endless(request))
        return self.sent[-1]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def asked(replicas: Replicas, client: str, count: int = 1) -> asyncio.Task:
    return asyncio.ensure_future(replicas.submit(Request("text", prompt="a", client=client, count=count)))


@pytest.mark.parametrize(
    ("clients", "order"), [("aaabb", "ababa"), ("aaaa", "aaaa"), ([("a", 3), ("a", 1), ("b", 1), ("b", 1)], "abba")]
)
def test_clients_take_turns_for_a_replica(clients, order):
    async def run():
        replicas = Replicas(handle := Handle(), {}, Limits(queue=8), 1)
        tasks = [asked(replicas, "somebody")]
        await settle()
        for client in clients:
            tasks.append(asked(replicas, *client))
            await settle()
        for number in range(len(tasks)):
            assert len(handle.sent) == number + 1
            handle.sent[-1].finish()
            await settle()
        assert all([(await task).future.done() for task in tasks])
        return "".join(answers.request.client for answers in handle.sent[1:])

    assert asyncio.run(run()) == order


def test_a_full_queue_makes_room_for_a_client_with_fewer_requests():
    async def run():
        replicas = Replicas(handle := Handle(), {}, Limits(queue=4), 1)
        tasks = [asked(replicas, client) for client in "aaaaa"]
        await settle()
        with pytest.raises(Refused, match="4 requests are waiting already"):
            await asked(replicas, "a")
        tasks.append(asked(replicas, "b"))
        await settle()
        with pytest.raises(Refused, match="made room") as refused:
            await tasks[4]
        assert refused.value.busy
        # A client that leaves frees its place, and one that has not been refused gets it.
        tasks[1].cancel()
        await settle()
        handle.sent[0].finish()
        await settle()
        assert [answers.request.client for answers in handle.sent] == ["a", "b"]
        # In another thread, when the server is closed.
        await asyncio.to_thread(replicas.close)
        for task in tasks[2:4]:
            with pytest.raises(Cancelled):
                await task
        with pytest.raises(Cancelled):
            await asked(replicas, "c")

    asyncio.run(run())
