"""The parts of fp8plan.runtime.controller: the law, what is remembered and said, and the alarms."""
