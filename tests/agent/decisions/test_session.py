"""The agent's count of messages, over connections and controllers."""

import pytest

from relight.agent.decisions.session import Session
from relight.core.protocol.events import ProcessExited, ProcessStarted
from relight.core.protocol.position import Position
from relight.wire.connection.framing import encode_frame
from relight.wire.messages import ForgetProcess, Pace, Received, Welcome

STARTED = ProcessStarted(process="a", pid=1)
EXITED = ProcessExited(process="a", exit_status=0, evidence="", position=Position(), noticed_ns=1)
ORDER = ForgetProcess(process="a")


@pytest.fixture
def session() -> Session:
    """Connected to the first controller."""
    session = Session("node-0", 2, "life", 30.0)
    assert session.begin(Welcome(job="j", life="one.1")) == ()
    return session


def test_what_is_not_confirmed_is_sent_again(session: Session) -> None:
    frames = (session.report(STARTED), session.report(EXITED))
    assert session.begin(Welcome(job="j", life="one.1", received=1)) == frames[1:]
    session.receive(Received(count=2))
    assert session.begin(Welcome(job="j", life="one.1", received=2)) == ()


def test_another_controller_gets_all_that_none_has_confirmed(session: Session) -> None:
    frame = session.report(STARTED)
    session.receive(ORDER)
    assert session.begin(Welcome(job="j", life="two.1")) == (frame,)
    hello = session.hello(())
    assert (hello.controller, hello.received) == ("two.1", 0)


def test_hello_names_also_processes_whose_end_is_still_to_be_reported(session: Session) -> None:
    session.report(EXITED)
    assert session.hello(("b",)).processes == ("a", "b")
    session.receive(Received(count=1))
    assert session.hello(("b",)).processes == ("b",)


def test_orders_are_confirmed_together_and_once(session: Session) -> None:
    assert session.confirmation() == b""
    assert session.receive(ORDER)
    assert session.receive(ORDER)
    assert not session.receive(Pace(sample_seconds=1.0, trace=True))
    assert session.confirmation() == encode_frame(Received(count=2))
    assert session.confirmation() == b""
    assert session.hello(()).received == 2


def test_a_controller_that_refuses_the_first_hello_is_not_asked_again(session: Session) -> None:
    assert Session("node-0", 2, "life", 30.0).why_given_up("no", 0.0, refused=True) == "no"
    assert session.why_given_up("no", 0.0, refused=True) == ""


def test_patience_has_an_end(session: Session) -> None:
    assert session.why_given_up("no", 30.0, refused=False) == ""
    assert session.why_given_up("no", 30.1, refused=False) == "no, for 30 s"
