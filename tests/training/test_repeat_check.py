"""The step that is computed twice: what threads of the script seem to change in it ends no job."""

import threading

from relight.training.worker.proof.repeat import _has_threads_of_script


def test_threads_of_the_script_are_told_from_others() -> None:
    done, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        done.wait()

    librarys, scripts = threading.Thread(target=done.wait), threading.Thread(target=wait)
    librarys.start()
    before = _has_threads_of_script()
    scripts.start()
    begun.wait()
    now = _has_threads_of_script()
    done.set()
    librarys.join()
    scripts.join()

    assert (before, now) == (False, True)
