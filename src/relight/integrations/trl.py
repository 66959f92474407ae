"""TRL's `SFTTrainer`, surviving failures: import it from here, and start the script with `relight run`.

    from relight.integrations.trl import SFTTrainer  # instead of `from trl import SFTTrainer`

Import this module before you make the arguments (`SFTConfig`), as it joins the job. Other trainers of TRL
are refused before the first step.
"""

import trl

from relight.integrations.transformers import RelightMixin

__all__ = ["SFTTrainer"]


class SFTTrainer(RelightMixin, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` that survives failures."""
