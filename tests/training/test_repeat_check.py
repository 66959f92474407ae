"""The step that is computed twice: what threads of the script seem to change in it ends no job."""

import sys
import threading

from relight.training.worker.proof.repeat import _has_threads_of_script, _runs_script


def test_threads_of_the_script_are_told_from_others() -> None:
    done, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        done.wait()

    librarys, scripts = threading.Thread(target=done.wait), threading.Thread(target=wait)
    librarys.start()
    scripts.start()
    begun.wait()
    frames = sys._current_frames()  # other tests may have left threads of their own
    found = [_runs_script(frames[thread.ident or 0]) for thread in (librarys, scripts)]
    has_some = _has_threads_of_script()
    done.set()
    librarys.join()
    scripts.join()

    assert found == [False, True]
    assert has_some
