"""`python -m tests.agent.start_agent PROGRAM ...`: the agent as it is, with PROGRAM in place of the user's script."""

import sys

from relight.agent.__main__ import main

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.exit(main(arguments, command=(program, "-m", "tests.agent.worker")))
