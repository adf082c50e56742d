"""Real RL runs of several arms: what FP8 rollouts do to learning, predicted and observed."""
