"""The speed guard: observation, prediction, causes of the difference, and advice."""
