"""Numbers that others have sent, within bounds: what the journal can hold, and what may be reckoned with.

JSON has neither NaN nor infinity and 64 bits for a whole number. A message with anything else is refused where it is
decoded, so that no defect elsewhere makes the journal unreadable for the controller's successor.
"""

from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]  # clock readings in ns, too; sums stay in 64 bits
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
