"""torchtitan's command, with the trainer that survives failures."""

from relight.integrations.torchtitan.trainer import main

main()
