"""States of a worker: what its main thread does, or waits for."""

import enum


class State(enum.Enum):
    """The state of a worker between two events."""

    STARTING = "runs the script up to its first step"
    IDLE = "is a standby that waits for a rank"
    PROMOTED = "was given a rank, and holds nothing yet"
    ENTERED = "waits until all initial ranks may begin"
    OUTSIDE = "is between two steps"
    IN_STEP = "is in a step, before its barrier"
    AT_BARRIER = "is prepared, and waits for the other ranks"
    WRITING = "is past the barrier, or finishes the step by itself"
    DONE = "has no step left, and waits for the other ranks"
    RELEASED = "runs to the end of the script"
    PARKED = "has reported its status, and waits for a decision"
    ORDERED = "knows the decision, and leaves the interrupted step"
    COPYING = "takes the target version from elsewhere"
    FORMING = "holds the target version, and forms the new groups"
    RESTORED = "has reported that it is restored, and waits for Resume"
    SAVING = "writes its part of a last checkpoint"
    FAILED = "has nothing left to do in this generation"
    HELD = "has a script that failed, and is kept for a last checkpoint"
    ENDING = "has a script that failed, and exits"

    __hash__ = object.__hash__  # by identity, in C: a step looks up some of them
