"""fp8plan inside of verl: with `actor_rollout_ref.rollout.name=fp8plan` its rollouts are planned, synced, corrected.

verl loads `plugin` at every `import verl` (entry point group verl.plugins); all else is imported where it is used.
"""

from typing import Final

NAME: Final = "fp8plan"  # of the rollout
