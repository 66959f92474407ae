"""Reports of several publishing processes about themselves, in one value."""

from relight.core.account.report import PublishReport
from relight.timeline.model.publications import Publications
from relight.wire.status import EngineVersion, PublishStatus


def test_nothing_was_published() -> None:
    found = Publications()
    assert found.newest is None
    assert found.report() is None


def test_a_process_says_the_same_again_and_its_successor_goes_on() -> None:
    found = Publications()
    engine = EngineVersion(name="engine", pid=7, version=2)
    found.add(PublishStatus(process="w0", engines=(engine,), updates=1, updates_bytes=10, updates_seconds=0.5))
    found.add(PublishStatus(process="w0", engines=(engine,), updates=2, updates_bytes=20, updates_seconds=1.0))
    successor = PublishStatus(process="w4", updates=1, updates_bytes=10, updates_seconds=0.25)
    found.add(successor)
    assert found.newest == successor
    assert found.report() == PublishReport(updates=3, updates_bytes=30, updates_seconds=1.25, engines={})
