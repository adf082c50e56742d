"""The doctor: the real settings and the faults of an engine, a server or a run, by checks of observations."""
