"""Requests of several clients take turns, and none of them holds all places of the queue."""

import pytest

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits, Refused, Request


@pytest.fixture
def engine(held):
    engine = Engine({"text": held}, Limits(queue=4, batch=1))
    yield engine
    held.go.set()
    engine.close()


def ask(engine, client: str, count: int = 1):
    return engine.submit(Request("text", prompt="a", client=client, count=count))


def begin(engine, held):
    """A request that keeps the others waiting."""
    first = ask(engine, "somebody")
    assert held.entered.wait(60)
    return first


def order(engine) -> list[str]:
    return [ticket.request.client for ticket in engine._waiting]


def test_clients_take_turns(engine, held):
    begin(engine, held)
    tickets = [ask(engine, client) for client in "aabb"]
    assert order(engine) == ["a", "b", "a", "b"]
    held.go.set()
    for ticket in tickets:
        ticket.result(60)
    # Turns go on from the last one that began.
    assert engine._turn == max(ticket.turn for ticket in tickets)


def test_a_request_for_many_images_is_many_turns(engine, held):
    begin(engine, held)
    for client, count in (("a", 3), ("a", 1), ("b", 1), ("b", 1)):
        ask(engine, client, count)
    assert order(engine) == ["a", "b", "b", "a"]


def test_a_request_that_is_given_back_keeps_its_turn(engine, held):
    begin(engine, held)
    tickets = [ask(engine, client) for client in "aabb"]
    for ticket in (tickets[1], tickets[0]):
        engine._drop(ticket)
        engine._give_back(ticket)
        turns = [one.turn for one in engine._waiting]
        assert turns == sorted(turns) and order(engine).count("a") == 2
    assert engine._waiting[0] is tickets[0]


def test_a_full_queue_makes_room_for_a_client_with_fewer(engine, held):
    begin(engine, held)
    many = [ask(engine, "a") for _ in range(4)]
    with pytest.raises(Refused) as refused:
        ask(engine, "a")
    assert refused.value.busy
    one = ask(engine, "b")
    other = ask(engine, "b")
    assert order(engine) == ["a", "b", "a", "b"]
    for ticket in many[2:]:
        assert isinstance(ticket.future.exception(0), Refused) and ticket.future.exception(0).busy
    # Both have as many now.
    for client in "ab":
        with pytest.raises(Refused):
            ask(engine, client)
    held.go.set()
    assert all(ticket.result(60).images for ticket in (*many[:2], one, other))


def test_a_request_that_has_begun_keeps_its_place(engine, held):
    """A request for several images waits with those that have not begun."""
    ask(engine, "a", count=3)
    assert held.entered.wait(60)
    for _ in range(3):
        ask(engine, "a")
    ask(engine, "b")
    assert [ticket.begun for ticket in engine._waiting] == [True, False, False, False]
    assert order(engine).count("b") == 1
